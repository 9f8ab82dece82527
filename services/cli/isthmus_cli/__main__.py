"""``python -m isthmus_cli``"""

from isthmus_cli.main import main

if __name__ == "__main__":
    main()
