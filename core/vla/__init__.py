"""Data of vision-language-action models: metadata, tokens of actions, images, and the layout of a step."""
