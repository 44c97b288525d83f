"""What the command line shows, one file per subject. These import rich, so commands import them where they use them."""
