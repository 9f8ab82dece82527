"""A small torch transformer with real paged KV in any layout. CPU; correctness before speed."""
