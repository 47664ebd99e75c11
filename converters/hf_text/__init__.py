"""Text datasets from a Hugging Face hub, and folders that the datasets library saved: every row is an episode."""

from __future__ import annotations

from ...core.declarations import FormatDeclaration

__all__ = ["FORMATS"]

FORMATS = (
    FormatDeclaration(
        name="hf-text",
        package=__name__,
        order=81,
        reader="reader:HfTextReader",
        source="reader:HfTextSource",
        title="Hugging Face text",
        example=("CarperAI/openai_summarize_tldr", "tldr"),
        found="a folder of save_to_disk of the datasets library, with a column of text; or a download of Parquet files",
        ends="every row is an episode of one step, terminated",
        final="no",
    ),
)
