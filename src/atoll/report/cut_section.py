"""The section of a run's report about where its model was cut, and what crossed the cut."""

from __future__ import annotations

from html import escape

from atoll.report.reading import Json, RunRecord, count_text, human_bytes, human_seconds, number
from atoll.report.shell import html_table


def cut_section(record: RunRecord, cut: Json) -> str:
    """Return the section as HTML; `cut` is what `run.json` says of the cut."""
    split = record.plan.split
    assert split is not None
    table, texts = _of_parties(cut) if "parties" in cut else _of_layers(split.way, cut)
    last = record.rows[-1] if record.rows else {}
    counted = [number(last, key) for key in ("messages", "round_trips", "cut_bytes")]
    if None not in counted:
        messages, trips, crossed = (value or 0.0 for value in counted)
        texts.append(
            f"{messages:,.0f} messages in all, and {trips:,.0f} round trips one upon another; {human_bytes(crossed)} "
            "crossed the cut."
        )
    if (seconds := number(last, "simulated_seconds")) is not None:
        rate = "no limit of bandwidth" if split.bandwidth is None else f"{human_bytes(split.bandwidth)} a second"
        texts.append(
            f"They take {human_seconds(seconds)} on links of {rate} with a round trip of "
            f"{human_seconds(split.latency or 0.0)}; computing is not counted."
        )
    return table + "".join(f'<p class="note">{escape(text)}</p>' for text in texts)


def _of_layers(way: str, cut: Json) -> tuple[str, list[str]]:
    """Return the table of both sides, and what crosses between them."""
    server = f"after layer {cut['after']}" + ("" if cut["tail"] is None else f", up to layer {cut['tail']}")
    client = f"up to layer {cut['after']}" + ("" if cut["tail"] is None else f", and from layer {cut['tail']} on")
    sides = [
        ["each client", client, count_text(cut["client_params"]), human_bytes(cut["client_bytes"])],
        ["the server", server, count_text(cut["server_params"]), human_bytes(cut["server_bytes"])],
    ]
    table = html_table(["side", "layers", "parameters", "bytes"], [[escape(cell) for cell in row] for row in sides], 2)
    values = " and ".join("x".join(map(str, shape)) for shape in cut["shapes"])
    labels = "the server has the labels" if cut["tail"] is None else "labels stay with the clients"
    texts = [
        f"{way}: {values} values of each sample cross the cut each way, {human_bytes(cut['sample_bytes'])} a "
        f"sample and pass; {labels}. With fewer than {cut['break_even']:,.0f} samples a client, "
        "an epoch takes fewer bytes than a round of federated learning."
    ]
    return table, texts


def _of_parties(cut: Json) -> tuple[str, list[str]]:
    """Return the table of parties and server, and what crosses between them."""
    rows = [
        [
            party["name"] + (", with the labels" if party["name"] == cut["labels"] else ""),
            f"{party['columns']:,}",
            f"{party['width']:,}",
            count_text(party["params"]),
            human_bytes(party["bytes"]),
        ]
        for party in cut["parties"]
    ]
    rows.append(["the server", "", "", count_text(cut["server_params"]), human_bytes(cut["server_bytes"])])
    head = ["side", "columns", "values a row", "parameters", "bytes"]
    labels = "go to the server" if cut["tail"] is None else f"stay there, with the layers from {cut['tail']} on"
    texts = [
        f"{len(cut['parties'])} parties hold columns of {cut['rows']:,} rows; {cut['width']:,} values of each cross "
        f"the cuts each way, {human_bytes(cut['sample_bytes'])} a row and pass; labels of {cut['labels']} {labels}."
    ]
    return html_table(head, [[escape(cell) for cell in row] for row in rows], 1), texts
