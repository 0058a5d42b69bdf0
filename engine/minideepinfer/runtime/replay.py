"""Which rows run which layers: the tail of a prompt in the decoder, and what is run again behind a prefix hit."""

from __future__ import annotations

from minideepinfer.config import TextConfig


def tail_rows(config: TextConfig, replay: str) -> int | None:
    """Last rows of a prompt that run the layers from the candidate source on (architecture section 6, spec 4.2).

    Returns:
        None = all of them (`full`); W, the window (`bounded`); with `halo` W + (n - 1)(W - 1) for the n layers behind
        the candidate source, each of which loses W - 1 rows at the front to a window that is cut off there.
    """
    window, behind = config.sliding_window, sum(layer.behind_candidate_source for layer in config.layers)
    return {"full": None, "halo": window + max(0, behind - 1) * (window - 1), "bounded": window}[replay]


def replay_start(config: TextConfig, replay: str, hit: int, prompt: int) -> int:
    """First row that a prompt runs when the global entries of its first tokens are known (spec 4.3).

    Rows before `hit` only rebuild window rings. With `bounded` the last window is run; their own windows are cut off,
    an approximation. Else as many as it takes for a hit to equal a cold run: each layer loses W - 1 rows to a window
    that is cut off, so rows that must be exact come (W - 1) x layers behind the start. With `halo` the encoder's output
    must be exact in rows that are new, in the tail that enters the decoder, and in the window before that tail, which
    the candidate source reads whole; with `full` all layers run on all rows.

    Args:
        config: the model's facts.
        replay: `full`, `halo` or `bounded`.
        hit: tokens whose entries are known, fewer than `prompt`.
        prompt: tokens of the prompt.

    Returns:
        0 if everything must be run, so that the hit saves nothing.
    """
    lost, tail = config.sliding_window - 1, tail_rows(config, replay)
    if replay == "bounded":
        return max(0, hit - config.sliding_window)
    if tail is None:
        return max(0, hit - lost * config.num_hidden_layers)
    return max(0, min(hit, prompt - tail - lost) - lost * config.candidate_source_layer_id)
