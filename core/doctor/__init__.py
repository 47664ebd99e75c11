"""Rules of behaviour for `check`: signs that a policy cannot be trained from data whose form is right."""
