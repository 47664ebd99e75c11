"""Operations of `preprocess` for robot data, such as the tasks of episodes."""
