"""Settings: the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .setting import Setting
from .setting import server_setting as _server


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of the model."""

    TITLE: ClassVar[str] = "The model"

    model_path: Annotated[
        str,
        Setting("Hugging Face directory, GGUF file (of a split one the first part), or config.json (dummy weights)"),
    ]
    tokenizer_path: Annotated[str | None, Setting("Directory or GGUF file of the tokenizer; default: --model-path")] = (
        None
    )
    skip_tokenizer_init: Annotated[bool, Setting("Load no tokenizer: prompts and answers are token ids")] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], Setting("Format of the weights; dummy: random weights")
    ] = "auto"
    weight_version: Annotated[
        str, Setting("Name of the weights, shown in answers; KV files of weights with another name are not read")
    ] = "default"
    weight_cache: Annotated[
        str,
        Setting(
            "Folder that caches packed or dequantised weights for later starts; auto: ~/.cache/tercet; off: no cache"
        ),
    ] = "auto"
    cpu_kernels: Annotated[
        str,
        Setting(
            "Tuning of the C++ kernels for the CPU; auto: measured at the first start, and kept in the folder of "
            "--weight-cache; fixed: not measured; or a JSON file, such as one that auto has kept"
        ),
    ] = "auto"
    update_weights_dir: Annotated[
        str | None,
        _server(
            "Folder whose models /update_weights_from_disk may load, which must exist; default: updates are refused"
        ),
    ] = None
    context_length: Annotated[
        int | None,
        Setting(
            "Maximum context length in tokens; default: the model's. For a model with LongRoPE, a value of at most "
            "its original length selects the frequencies for short contexts"
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Setting(
            "Data type of weights, activations and KV; auto: float16 or bfloat16 on a GPU, bfloat16 or float32 on a "
            "CPU; a CPU keeps matrices in the data type of their file if its kernels can convert it"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "fp8"] | None,
        Setting(
            "8-bit or 4-bit weights, multiplied with 8-bit activations: int8 and int4 on a CPU, fp8 with "
            "--attention-backend triton, where experts multiply activations of --dtype; default: as the file stores "
            "them if the device multiplies that form, else in --dtype"
        ),
    ] = None
    chat_template: Annotated[str | None, Setting("Jinja chat template: a file or the template itself")] = None
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "deepseek_v3",
            "gemma",
            "gpt-oss",
            "hermes",
            "llama3_json",
            "mistral",
            "pythonic",
            "qwen3_coder",
        ],
        _server("Format of the model's tool calls; auto: detected from the chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["deepseek-r1", "gpt-oss", "granite", "mistral", "qwen3"] | None,
        _server("Format of the model's reasoning, which is then separated from the content; default: not separated"),
    ] = None
    grammar_backend: Annotated[
        Literal["auto", "xgrammar", "llguidance", "none"],
        Setting(
            "Library for structured output; auto: xgrammar for plain JSON schemas, llguidance for everything else; "
            "xgrammar refuses schemas that are not plain"
        ),
    ] = "auto"
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Setting("Source of default sampling parameters: the model's generation_config, or OpenAI's defaults"),
    ] = "model"
    enable_return_hidden_states: Annotated[
        bool,
        Setting(
            "Allow requests to get hidden states; decode steps of such requests are slower, because they are not "
            "recorded"
        ),
    ] = False
    allow_auto_truncate: Annotated[
        bool, Setting("Drop the first tokens of a prompt that is too long, instead of refusing it")
    ] = False
    random_seed: Annotated[
        int | None,
        Setting("Seed for requests without a seed and for dummy weights; default: random at each start"),
    ] = None
