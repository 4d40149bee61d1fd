"""A comparison shows itself: its columns, the sentences about them, and a table in notebooks."""

from dataclasses import replace

from regard.compare.measure import DECODED


def test_a_notebook_shows_the_verdict_and_every_row(result):
    html = replace(result, verdict="<i>best</i>")._repr_html_()
    assert "&lt;i&gt;best&lt;/i&gt;" in html
    assert html.count("<tr>") == 1 + sum(not row.remark for row in result.rows)
    assert f"{result.rows[0].perplexity:,.2f}" in html
    assert "<script" not in html


def test_a_column_has_the_bytes_in_the_dtype_of_the_run_if_it_is_another(result):
    assert "run_bytes_per_token" not in result.columns
    other = replace(result, cache_dtype="float16")
    assert other.columns["run_bytes_per_token"] == "the same in float32"
    assert "the same in float32" in other._repr_html_()
    assert "float16 run in float32" in other._repr_html_()


def test_the_sentences_say_how_many_tokens_were_decoded(result):
    assert result.legend.startswith(f"Decode perplexity: of the last {2 * DECODED} tokens")
