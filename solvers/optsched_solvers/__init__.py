"""Interchangeable backends of `optsched.solve`, and the kernels they share.

=====================  ===========================================================================
engine                 its rooms
=====================  ===========================================================================
`portfolio` (`auto`)   `race`: engines in threads, one incumbent and one bound; `cores`;
                       `hand_made` (pipelines that people know), `cycle_auto` (periods),
                       `recompute_choice`
`dispatch`             `rules` on `optsched.kernels.list_schedule`, `insertion`,
                       `late_acceptance` (job orders, micro-batches);
                       for periods `rolling_rules`, `rolling_insertion`, `rolling_search`
                       over `rolling_orders`
`tabu`                 `tabu_walk`, `neighbourhoods`, `search_state`, `search_arrays`,
                       `path_relinking`; for periods `cycle_search`, `cycle_moves`,
                       `cycle_shifts`, `cycle_estimates`, `cycle_state`
`branch_and_bound`     `failure_directed` and `destructive` over `disjunctive_tree`,
                       `disjunctive_state`, `disjunctive_propagation`, `edge_finding`,
                       `tree_search`
`giffler_thompson`     one file, in plain Python
`cpsat`                `cpsat_model`; for periods `cycle_cpsat`, `cycle_cpsat_model`; for routing
                       `routing_windows` over `_search`, `_model` and `_bound`
`genetic`              one evolution, a decoder per kind of problem
=====================  ===========================================================================

Shared: `longest_path`, `bounds` (one machine), `pipeline_bounds` with `common_routes`,
`order_relaxations` and `order_states` (the price of overtaking), `identical_jobs` and
`symmetry_order`, `compiled` (how kernels compile), `loading` (without missing a limit for it).
"""
