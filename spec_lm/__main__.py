"""`python -m spec_lm` is `spec-lm`."""

from spec_lm.cli import main

if __name__ == "__main__":
    main()
