"""Interchangeable backends of `optsched.solve`: a folder for each kind of problem.

==============  ==================================================================================
folder          what is in it
==============  ==================================================================================
`shop`          least makespan of job shops and job arrays: `auto`, `dispatch` (`rules` on
                `optsched.kernels.list_schedule`), `cpsat`, `branch_and_bound`; `tabu/` (the walk
                and its neighbourhoods), `proof/` (failure-directed search, one-machine bounds)
`periodic`      least period of rolling arrays: `auto`, `construct`, `search`, `cpsat`
`quota`         GPUs per job: `auto`, shares, tables, multiple choice, placement, tree, CP-SAT
`gpus`          which GPUs: `auto`, `counts`, trees, `eha`, `pts`, `hybrid`, CP-SAT
`literature`    what our engines beat, kept to compare with: one genetic algorithm with a
                decoder per kind, Giffler and Thompson's tree, baselines of GPU choice
==============  ==================================================================================

Shared: `_cpsat` (the driver of CP-SAT), `_portfolio` (engines side by side, one incumbent and one
bound), `_loading` (kernels, without missing a limit for them).

Entry points name them, a group for each kind (``optsched.solvers.jobshop``, ...): other
packages register their solvers in the same way (docs/orders/write-a-solver.md).
"""
