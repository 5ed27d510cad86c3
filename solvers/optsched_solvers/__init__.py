"""Interchangeable backends of `optsched.solve`, and the kernels they share.

=====================  ===========================================================================
engine                 its rooms
=====================  ===========================================================================
`portfolio` (`auto`)   `race`: engines in threads, one incumbent and one bound; `cores`;
                       `hand_made` (pipelines that people know), `cycle_auto` (periods),
                       `recompute_choice`
`dispatch`             `rules`, `list_schedule`, `quick_list` (no compiler), `insertion`,
                       `job_order_search`, `microbatch_search` (one job), `late_acceptance`;
                       for periods `rolling_rules`, `rolling_insertion`, `rolling_search`
                       over `rolling_orders`
`tabu`                 `walk`, `neighbourhoods`, `state`, `arrays`, `path_relinking`;
                       for periods `cycle_search`, `cycle_moves`,
                       `cycle_shifts`, `cycle_estimates`, `cycle_state`
`branch_and_bound`     `failure_directed` and `destructive` over `tree`, `tree_search`,
                       `propagation` (with edge finding) and `state`;
                       `giffler_thompson`, `giffler_thompson_tree`,
                       `giffler_thompson_node`
`cpsat`                `cpsat_model`; for periods `cycle_cpsat`, `cycle_cpsat_model`; for routing
                       `routing_windows` over `_search`, `_model` and `_bound`
`genetic`              `operation_based`, `crossover`; for periods `cycle_genetic`
=====================  ===========================================================================

Shared: `longest_path`, `bounds` (one machine), `pipeline_bounds` with `common_routes`,
`order_relaxations` and `order_states` (the price of overtaking), `symmetry`
(identical jobs), `compiled` (how kernels compile), `loading` (without missing a limit for it).
"""
