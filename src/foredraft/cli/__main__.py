from foredraft.cli import main

main()
