"""`tokenmill bench`: measure on the user's own data and machine.

    cli -> strategy_race, engine_race, worker_race, loader_race -> bench_report -> contenders -> child, a fresh process
     |                                                                  |
     v                                                                  v
    plots                                                          measurement

A contender is a function with settings. Each run gets a process of its own; contenders take turns. A process
answers with what it measured; only this package turns the answers into figures and verdicts.
"""
