"""Rules of behaviour for `check`: signs that a policy cannot learn from data although their form is right."""
