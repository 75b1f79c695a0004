from shardmill.cli import main

main()
