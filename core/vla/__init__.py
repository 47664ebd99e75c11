"""Data for vision-language-action models: metadata, action tokens, image preprocessing, and the layout of a step."""
