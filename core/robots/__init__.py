"""Operations of `preprocess` for robot data, action spaces and tasks; and actions of a policy as a robot takes them."""
