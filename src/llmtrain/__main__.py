"""`python -m llmtrain` is the same as the console script."""

from llmtrain.cli import main

if __name__ == "__main__":
    main()
