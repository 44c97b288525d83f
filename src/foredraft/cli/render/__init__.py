"""What the command line shows: a file for each subject. These import rich, so commands import them where they use them."""
