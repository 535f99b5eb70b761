"""Longformer: RoBERTa with a window in each layer, and global tokens with projections of their own."""

from clearhead.core.config import MOST_LAYERS, ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import BLOCK, ROBERTA, SHAPE, classes, embedding, heads, layers, masked_head
from clearhead.hub.fields import ConfigPart, Json, fixed, positions_after_padding
from clearhead.hub.files import refuse
from clearhead.hub.rules import same
from clearhead.variants.kinds import GlobalKind, GlobalTokens

WINDOW, SEPARATOR = 512, 2  # where config.json does not say
OWN = "longformer.encoder.layer.{i}.attention.self"
# Which tokens are global where a call names none; in other classes, none.
GLOBAL: dict[str, GlobalTokens] = {
    "LongformerForSequenceClassification": "first",
    "LongformerForQuestionAnswering": "question",
}


def _read(config_json: Json) -> Json:
    count, stated = int(config_json["num_hidden_layers"]), config_json.get("attention_window", WINDOW)
    refuse(count > MOST_LAYERS, f"config.json has num_hidden_layers {count:,}: {MOST_LAYERS:,} is the most")
    windows = stated if isinstance(stated, list) else [stated] * count
    refuse(
        len(windows) != count or any(type(width) is not int or width < 2 or width % 2 for width in windows),
        f"config.json has attention_window {str(stated)[:60]}: "
        f"give an even number, 2 at least, or one for each of the {count} layers",
    )
    dilation = config_json.get("attention_dilation")
    refuse(
        any(step != 1 for step in (dilation if isinstance(dilation, list) else [dilation or 1])),
        f"config.json has attention_dilation {str(dilation)[:60]}: only 1 is supported for this architecture",
    )
    named = (config_json.get("architectures") or [""])[0]
    tokens, separator = GLOBAL.get(named, "given"), config_json.get("sep_token_id")
    asked = {"separator": SEPARATOR if separator is None else separator} if tokens == "question" else {}
    kinds = tuple(str(GlobalKind(width // 2 + 1, tokens, **asked)) for width in windows)
    return {"attention": kinds[0] if len(set(kinds)) == 1 else kinds}


def _write(config: ModelConfig) -> Json:
    kinds = [kind for kind in config.main.kinds if isinstance(kind, GlobalKind)]
    refuse(len(kinds) < config.n_layers, "this architecture has global tokens in every layer")
    windows = [2 * (kind.size - 1) for kind in kinds]
    separators = [kind.separator for kind in kinds if kind.tokens == "question"]
    return {
        "attention_window": windows[0] if len(set(windows)) == 1 else windows,
        **({"sep_token_id": separators[0]} if separators else {}),
    }


LONGFORMER = Architecture(
    model_type="longformer",
    classes=classes(
        "Longformer",
        # This head has GELU, whatever activation the layers have.
        ForMaskedLM={"head": "mlm", "head_transform": True, "head_bias": True, "head_activation": "gelu"},
    ),
    prefix="longformer.",
    config=(
        *SHAPE,
        positions_after_padding(rows=512, padding=1),
        fixed(only={"autoregressive": False}),
        ConfigPart(_read, _write),
    ),
    rules=(
        *embedding("longformer"),
        *layers("longformer"),
        *same(
            {
                f"{OWN}.query_global": f"{BLOCK}.attention.q_global",
                f"{OWN}.key_global": f"{BLOCK}.attention.k_global",
                f"{OWN}.value_global": f"{BLOCK}.attention.v_global",
            }
        ),
    ),
    heads={
        **heads(masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head"), "longformer.pooler.dense"),
        "classifier": ROBERTA.heads["classifier"],
    },
    ignored=("longformer.embeddings.position_ids",),
    carried=("longformer.pooler.*",),
)
