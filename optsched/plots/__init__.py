"""Pictures of a schedule, whoever made it: `optsched.plots.gantt` and `optsched.plots.html`."""
