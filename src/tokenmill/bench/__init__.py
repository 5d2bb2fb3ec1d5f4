"""`tokenmill bench`: measuring on the user's own data and machine.

    cli -> strategies, engines, workers -> racing -> measuring -> run_one, in a fresh process
        -> loaders --------------------------------> |
                                                     v
                                         reporting, plots <- figures

A contender is a function with settings. It runs in a process of its own, in turns with the others, and
answers with what it took; what is said about the answers is worked out here and nowhere else.
"""
