"""The architectures of GGUF files: their families, and the pair layout that llama.cpp gives each."""

from __future__ import annotations

# The family of each architecture, and whether its GGUF has neighbouring pairs (llama.cpp's NORM) or halves (NEOX).
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("llama", True),
    "llama4": ("llama4_text", True),
    "mistral3": ("ministral3", True),
    "smollm3": ("smollm3", True),
    "arcee": ("arcee", True),
    "granite": ("granite", True),
    "granitemoe": ("granitemoe", True),
    "granitehybrid": ("granitemoehybrid", True),
    "command-r": ("cohere", True),
    "cohere2": ("cohere2", True),
    "olmo": ("olmo", True),
    "ernie4_5": ("ernie4_5", True),
    "ernie4_5-moe": ("ernie4_5_moe", True),
    "internlm2": ("internlm2", True),
    "baichuan": ("baichuan", True),
    "minicpm": ("minicpm", True),
    "glm4": ("glm4", True),
    "deepseek2": ("deepseek_v3", True),
    "falcon": ("falcon", False),
    "stablelm": ("stablelm", False),
    "qwen2": ("qwen2", False),
    "qwen2moe": ("qwen2_moe", False),
    "qwen3": ("qwen3", False),
    "qwen3moe": ("qwen3_moe", False),
    "qwen3next": ("qwen3_next", False),
    "qwen2vl": ("qwen2_vl", False),
    "qwen3vl": ("qwen3_vl", False),
    "qwen3vlmoe": ("qwen3_vl_moe", False),
    "olmo2": ("olmo2", False),
    "olmoe": ("olmoe", False),
    "phi2": ("phi", False),
    "phi3": ("phi3", False),
    "phimoe": ("phimoe", False),
    "gemma": ("gemma", False),
    "gemma2": ("gemma2", False),
    "gemma3": ("gemma3_text", False),
    "starcoder2": ("starcoder2", False),
    "gptneox": ("gpt_neox", False),
    "nemotron": ("nemotron", False),
    "exaone": ("exaone", False),
    "exaone4": ("exaone4", False),
    "minicpm3": ("minicpm3", False),
    "glm4moe": ("glm4_moe", False),
    "gpt-oss": ("gpt_oss", False),
    "hunyuan-dense": ("hunyuan_v1_dense", False),
    "hunyuan-moe": ("hunyuan_v1_moe", False),
    "lfm2": ("lfm2", False),
    "seed_oss": ("seed_oss", False),
    "apertus": ("apertus", False),
    "minimax-m2": ("minimax_m2", False),
    "afmoe": ("afmoe", False),
    "modern-bert": ("modernbert", False),
    "nomic-bert": ("nomic_bert", False),
    "dbrx": ("dbrx", False),
}
# Architectures without rotation, read by their family's name.
UNROTATED: dict[str, str] = {
    "gpt2": "gpt2", "bloom": "bloom", "mpt": "mpt", "mamba": "mamba", "mamba2": "mamba2", "bert": "bert", "t5": "t5",
    "jamba": "jamba",
}  # fmt: skip
# Families to whose layers llama.cpp gives the stated window; the others see everything, whatever the file says.
WINDOWED = ("gemma2", "gemma3_text", "cohere2", "gpt_oss", "exaone4", "afmoe", "modernbert", "phi3")
# Families with two bases: the config keys of the one of the far layers and of the one of the windowed layers.
LOCAL_BASES = {
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
}
# Layers of the largest model of the families that scale their scores by a number of their own.
QUERY_SCALARS = {"gemma2": 46, "gemma3_text": 62}
