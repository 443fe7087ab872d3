"""Rules for splitting weights: the words of a rule, and the rules that are known for models of transformers.

A rule has a pattern of module names, in which ``*`` stands for any part of a name, and one of the words. Of several
rules that match a module the last rule counts.
"""

RULES_KEY = "tensor_parallel"  # key of a recipe's model that has its rules, in errors
COLUMN, ROW, HEADS, VOCABULARY, WHOLE = RULES = ("column", "row", "heads", "vocabulary", "whole")

STYLES = {
    "colwise": COLUMN,
    "colwise_rep": COLUMN,
    "colwise_gather_output": COLUMN,
    "packed_colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_rep": ROW,
    "rowwise_split_input": ROW,
    "embedding_rowwise": VOCABULARY,
    "embedding_colwise": COLUMN,
    "replicated": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
}
"""Words for the styles in a ``tp_plan`` of transformers. What is gathered or reduced follows from the weights, so
styles that differ only in this have the same word."""

HEAD = "lm_head"  # module that transformers' plans split like any column, although its rows are the vocabulary's

_PROJECTIONS = {
    "*.attention.q_proj": HEADS,
    "*.attention.k_proj": HEADS,
    "*.attention.v_proj": HEADS,
    "*.attention.o_proj": ROW,
    "*.mlp.fc1": COLUMN,
    "*.mlp.fc2": ROW,
}

SHIPPED = {
    "gpt2": {
        "*wte": VOCABULARY,
        HEAD: VOCABULARY,
        "*attn.c_attn": HEADS,
        "*attn.c_proj": ROW,
        "*crossattention.q_attn": HEADS,
        "*crossattention.c_attn": HEADS,
        "*crossattention.c_proj": ROW,
        "*.mlp.c_fc": COLUMN,
        "*.mlp.c_proj": ROW,
    },
    "bert": {
        "*word_embeddings": VOCABULARY,
        "cls.predictions.decoder": VOCABULARY,
        "*.self.query": HEADS,
        "*.self.key": HEADS,
        "*.self.value": HEADS,
        "*.intermediate.dense": COLUMN,
        "*.output.dense": ROW,
    },
    "t5": {
        "shared": VOCABULARY,
        "*embed_tokens": VOCABULARY,
        HEAD: VOCABULARY,
        "*Attention.q": HEADS,
        "*Attention.k": HEADS,
        "*Attention.v": HEADS,
        "*Attention.o": ROW,
        "*.relative_attention_bias": COLUMN,
        "*DenseReluDense.wi*": COLUMN,
        "*DenseReluDense.wo": ROW,
    },
    "vit": _PROJECTIONS,
    "swin": _PROJECTIONS,
}
"""Rules by ``config.model_type``, for models of transformers that have no ``tp_plan``."""
