"""`advise`: the alternatives and what each costs."""
