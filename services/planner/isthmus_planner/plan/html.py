"""A plan as one HTML page with its charts inside; nothing is loaded from anywhere."""

from __future__ import annotations

from html import escape

from isthmus_planner.plan.charts import Bar, Point, bars, scatter, stacks
from isthmus_planner.plan.options import Option, Range
from isthmus_planner.plan.planning import Plan
from isthmus_planner.sim.hardware import Role

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1360px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.15rem; border-left: 4px solid #c2571a; padding: .4rem 1rem; background: #faf6f2; }
table { border-collapse: collapse; }
td, th { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 1.5rem; }
svg { width: 100%; height: auto; border: 1px solid #eee; }
.small { color: #666; font-size: .9rem; }
"""


def plan_html(plan: Plan) -> str:
    options = named_options(plan)
    body = [
        f"<h1>Plan for {escape(plan.model.name)}</h1>",
        f'<p class="verdict">{escape(plan.verdict)}</p>',
        f"<p>{escape(asked(plan))}</p>",
        "<h2>Plans compared</h2>",
        _table(options, saturated=plan.targets.ttft_s is None),
        '<p class="small">p50 / p90: p50 is what the closed forms say; nine in ten clusters should do at least as '
        "well as p90, by the model's error. Simulated (p50 / p90 of requests): at the highest load tried at which the "
        "targets are met.</p>",
        f'<div class="charts">{"".join(_charts(plan, options))}</div>',
        "<h2>Why</h2>",
        "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons) + "</ul>",
        *_settings(plan),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Isthmus plan: {escape(plan.model.name)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{''.join(part + chr(10) for part in body)}</body></html>\n"
    )


def named_options(plan: Plan) -> list[tuple[str, Option]]:
    """The recommended plan first; an alternative only where it is another."""
    found = [("recommended", plan.recommended)]
    for name, option in (("aggregated", plan.aggregated), ("disaggregated", plan.disaggregated)):
        if option is not None and option.assignment.counts != plan.recommended.assignment.counts:
            found.append((name, option))
    return found


def asked(plan: Plan) -> str:
    """What was asked for, in a sentence."""
    targets = []
    if plan.targets.ttft_s is not None:
        targets.append(f"TTFT at most {plan.targets.ttft_s * 1e3:g} ms")
    if plan.targets.itl_s is not None:
        targets.append(f"ITL at most {plan.targets.itl_s * 1e3:g} ms")
    mean = f"mean prompt {plan.mix.isl_tokens:.0f} and answer {plan.mix.osl_tokens:.0f} tokens"
    wanted = "" if plan.wanted_per_s is None else f"; {plan.wanted_per_s:g} requests per second wanted"
    return f"Objective {plan.objective}; {', '.join(targets) or 'no latency targets'}; {mean}{wanted}."


def _charts(plan: Plan, options: list[tuple[str, Option]]) -> list[str]:
    rates = [
        Bar(
            name,
            option.output_tokens_per_s.p50,
            option.output_tokens_per_s.p90,
            option.simulated.output_tokens_per_s if option.simulated is not None else None,
        )
        for name, option in options
    ]
    roles = [
        (
            each.node.name,
            [(role.value, counts[role]) for role in Role] + [("idle", each.node.count - sum(counts.values()))],
        )
        for each, counts in zip(plan.offers, plan.recommended.assignment.counts, strict=True)
    ]
    drawn = [
        bars("Output tokens per second (whisker: p90)", "tok/s", rates, "simulated"),
        stacks("Servers by role, recommended plan", "servers", roles),
    ]
    if plan.pareto:
        chosen = plan.recommended.assignment.counts
        points = [
            Point(
                option.output_tokens_per_s.p50,
                option.usd_per_m_output_tokens.p50,
                "",
                option.assignment.counts == chosen,
            )
            for option in plan.pareto
            if option.usd_per_m_output_tokens is not None
        ]
        drawn.append(scatter("Price against throughput (Pareto)", "output tok/s", "$ per million tokens", points))
    more = [Bar(each.node_type, each.share * 100) for each in plan.one_more]
    drawn.append(bars("What one more server would bring to the fastest plan", "% of rate", more))
    return drawn


def _table(options: list[tuple[str, Option]], *, saturated: bool) -> str:
    """Closed forms as p50 / p90, then the simulator; where requests queue without end their TTFT says nothing."""
    head = ["plan", "requests/s", "output tok/s", "$ per M output", "TTFT ms", "ITL ms", "constants"]
    head += ["simulated requests/s", "TTFT ms", "ITL ms"]
    rows = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    for name, option in options:
        price = option.usd_per_m_output_tokens
        cells = [name, _pair(option.requests_per_s, 1, 2), _pair(option.output_tokens_per_s, 1, 0)]
        cells += ["unknown" if price is None else _pair(price, 1, 3)]
        cells += [_pair(option.ttft_s, 1e3, 0), _pair(option.itl_s, 1e3, 2)]
        cells += ["calibrated" if option.calibrated else "specification", *_simulated(option, saturated)]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "<table>" + "".join(rows) + "</table>"


def _simulated(option: Option, saturated: bool) -> list[str]:
    found = option.simulated
    if found is None:
        return ["–", "–", "–"]
    rate = f"{found.requests_per_s:,.2f}" + ("" if found.steady else " (unsettled)")
    rate += "" if found.within_targets else " (late)"
    ttft, itl = Range(found.ttft_p50_s, found.ttft_p90_s), Range(found.itl_s, found.itl_p90_s)
    return [rate, "saturated" if saturated else _pair(ttft, 1e3, 0), _pair(itl, 1e3, 2)]


def _pair(value: Range, scale: float, digits: int) -> str:
    return " / ".join(f"{each * scale:,.{digits}f}" for each in (value.p50, value.p90))


def _settings(plan: Plan) -> list[str]:
    if plan.settings is None:
        return []
    rows = [
        "<tr><th>decode type</th><th>block</th><th>batch</th><th>pace</th><th>needed</th><th>credit window</th></tr>"
    ]
    for lane in plan.settings.lanes:
        pace, need = lane.pace_bytes_per_s / 1e9, lane.need_bytes_per_s / 1e9
        rows.append(
            f"<tr><td>{escape(lane.node_type)}</td><td>{lane.block_tokens} tokens</td><td>{lane.max_batch}</td>"
            f"<td>{pace:.2f} GB/s</td><td>{need:.2f} GB/s</td><td>{lane.credit_window_chunks} chunks</td></tr>"
        )
    return ["<h2>Settings of each decode replica</h2>", "<table>" + "".join(rows) + "</table>"]
