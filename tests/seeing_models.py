"Tiny models that see, of several families, with tokenizers and processors that are made here."

import torch
import transformers as T
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from grpo_nb.model.pictures import PictureProcessor

SPECIAL = {  # family -> the tokens of pictures, that of a vector first
    "qwen": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    "gemma4": ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "llava": ["<image>"],
    "idefics3": [
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{i + 1}_col_{j + 1}>" for i in range(2) for j in range(2)),
    ],
}
WRITTEN = {  # family -> what a chat template writes for a picture
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "mistral3": "[IMG]",
    "idefics3": "<image>",
    "llava": "<image>",
}
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'][0] }}:{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}PICTURE"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>a:{% endif %}"
)
TOOLS = (
    "{% if tools %}<|start|>s:{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>\n"
    "{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
TEXT = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
SECTIONS = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 1, 1])
PATCHES = dict(
    depth=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
)
SIGLIP = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
)
FAMILIES = {  # model_type -> tokens, settings of text, of the tower, of both
    "qwen2_5_vl": (
        "qwen",
        dict(rope_parameters=SECTIONS),
        PATCHES | dict(fullatt_block_indexes=[1], window_size=16),
        {},
    ),
    "qwen2_vl": (
        "qwen",
        dict(rope_parameters=SECTIONS),
        dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2)
        | dict(patch_size=4, spatial_merge_size=2, temporal_patch_size=2),
        {},
    ),
    "qwen3_vl": (
        "qwen",
        dict(rope_parameters=SECTIONS | dict(mrope_interleaved=True)),
        PATCHES | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
        {},
    ),
    "qwen3_5": (
        "qwen",
        LINEAR | dict(rope_parameters=SECTIONS | dict(partial_rotary_factor=1.0)),
        PATCHES | dict(num_position_embeddings=16),
        {},
    ),
    "qwen3_5_moe": (
        "qwen",
        LINEAR | EXPERTS | dict(rope_parameters=SECTIONS | dict(partial_rotary_factor=1.0)),
        PATCHES | dict(num_position_embeddings=16),
        {},
    ),
    "gemma3": (
        "gemma3",
        SLIDING | dict(query_pre_attn_scalar=8),
        SIGLIP | dict(vision_use_head=False),
        dict(mm_tokens_per_image=4),
    ),
    "gemma4": (
        "gemma4",
        SLIDING | dict(hidden_size_per_layer_input=8, global_head_dim=8, num_kv_shared_layers=0),
        dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            patch_size=4,
            pooling_kernel_size=2,
            position_embedding_size=64,
        ),
        {},
    ),
    "idefics3": ("idefics3", dict(model_type="llama"), SIGLIP, dict(scale_factor=2)),
    "smolvlm": ("idefics3", dict(model_type="llama"), SIGLIP, dict(scale_factor=2)),
    "mistral3": (
        "mistral3",
        dict(model_type="ministral3"),
        SIGLIP | dict(model_type="pixtral", head_dim=8, image_size=32),
        dict(spatial_merge_size=2),
    ),
    "llava_next": (
        "llava",
        dict(model_type="llama"),
        SIGLIP | dict(model_type="clip_vision_model"),
        dict(image_grid_pinpoints=[[16, 32], [32, 16]]),
    ),
}


def tokenizer_of(tokens):
    "A token for each byte, and those of the family."
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|start|>", "<|end|>", *SPECIAL[tokens]]
    whole.add_special_tokens([AddedToken(one, special=True) for one in special])
    more = {}
    if tokens.startswith("gemma"):
        image, begin, end = SPECIAL[tokens][:3]
        more = dict(image_token=image, boi_token=begin, eoi_token=end)
        if tokens == "gemma4":
            more |= dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<|audio|>")
    made = T.PreTrainedTokenizerFast(
        tokenizer_object=whole,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        padding_side="left",
        extra_special_tokens=more,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE.replace("PICTURE", WRITTEN[tokens])
    return made


def processor_of(kind):
    "A processor of transformers where it needs nothing that is not installed, or ours."
    tokens = FAMILIES[kind][0]
    tokenizer = tokenizer_of(tokens)
    if tokens == "qwen":
        size = {"shortest_edge": 64, "longest_edge": 1024}
        images = T.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
    elif tokens == "gemma3":
        images = T.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return T.Gemma3Processor(
            images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4
        )
    elif tokens == "gemma4":
        images = T.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    elif tokens == "mistral3":
        images = T.PixtralImageProcessorPil(size={"longest_edge": 24}, patch_size=8)
        return PictureProcessor(tokenizer, images, kind, patch_pixels=8)
    elif tokens == "llava":
        size = {"height": 16, "width": 16}
        images = T.LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=size, image_grid_pinpoints=[[16, 32], [32, 16]]
        )
        sizes = dict(patch_size=4, num_additional_image_tokens=1)
        sizes |= dict(vision_feature_select_strategy="default")
        return T.LlavaNextProcessor(
            images, tokenizer, chat_template=tokenizer.chat_template, **sizes
        )
    else:
        side = {"longest_edge": 16}
        images = T.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size=side)
        if kind == "idefics3":
            template = tokenizer.chat_template
            return T.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
        return PictureProcessor(tokenizer, images, kind, image_seq_len=4)
    return PictureProcessor(tokenizer, images, kind)


FILMS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2VL", "gemma4": "Gemma4"}


def processor_of_transformers(kind):
    "The same parts in transformers' own processor of the family; some want torchvision."
    made = processor_of(kind)
    own = getattr(T, T.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[kind])
    if isinstance(made, own):
        return made
    words = made.tokenizer
    given = dict(image_processor=made.image_processor, tokenizer=words)
    given |= dict(chat_template=words.chat_template)
    if kind == "mistral3":
        return own(**given, patch_size=4, spatial_merge_size=2)
    given |= dict(video_processor=getattr(T, f"{FILMS.get(kind, 'Qwen3VL')}VideoProcessor")())
    if kind == "gemma4":
        given |= dict(feature_extractor=T.Gemma4AudioFeatureExtractor())
    return own(**given)


def seeing(
    kind,  # of FAMILIES
    seed=0,
):  # the model in float32, in evaluation mode, and its processor
    "A tiny random model of a family, in which nothing is zero."
    tokens, text, tower, both = FAMILIES[kind]
    processor = processor_of(kind)
    words = processor.tokenizer
    ids = dict(vocab_size=len(words), pad_token_id=words.pad_token_id, bos_token_id=None)
    ids |= dict(eos_token_id=words.eos_token_id)
    image = words.convert_tokens_to_ids(SPECIAL[tokens][0])
    name = "image_token_index" if kind in ("gemma3", "mistral3", "llava_next") else "image_token_id"
    more = {name: image} | both
    if tokens == "qwen":
        video = words.convert_tokens_to_ids("<|video_pad|>")
        more |= dict(video_token_id=video)
        for which in ("start", "end"):
            more[f"vision_{which}_token_id"] = words.convert_tokens_to_ids(f"<|vision_{which}|>")
    if tokens == "gemma4":
        more |= dict(video_token_id=image + 3, audio_token_id=image + 4, audio_config=None)
        text = text | dict(vocab_size_per_layer_input=len(words))
    config = T.AutoConfig.for_model(
        kind,
        text_config=TEXT | ids | text,
        vision_config=tower,
        tie_word_embeddings=False,
        pad_token_id=words.pad_token_id,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T.AutoModelForImageTextToText.from_config(config).float().eval()
        for key, p in model.named_parameters():
            if p.ndim < 2 or not p.any():
                torch.nn.init.normal_(p, 0.5 if "norm" in key else 0.0, 0.2)
            elif "language_model" not in key and "text_model" not in key and "head" not in key:
                torch.nn.init.normal_(p, 0.0, 0.3)  # so that what is seen matters
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    return model, processor


def with_tools(processor):
    "The processor with a chat template that writes tools, their calls and what they answer."
    tokenizer = processor.tokenizer
    template = TOOLS + tokenizer.chat_template.replace(
        "<|end|>\n{% endfor %}", CALLS + "<|end|>\n{% endfor %}"
    )
    for one in (tokenizer, processor):
        one.chat_template = template
    return processor


def dots(count, width=24, height=16, seed=0):
    "Dark dots on a light ground."
    numbers = torch.Generator().manual_seed(seed)
    picture = Image.new("RGB", (width, height), (230, 240, 250))
    for _ in range(count):
        x, y = (int(torch.randint(3, n - 3, (), generator=numbers)) for n in (width, height))
        ImageDraw.Draw(picture).ellipse([x - 2, y - 2, x + 2, y + 2], fill=(20, 30, 160))
    return picture


def asked(*pictures, text="how many?"):
    "A row of a data set."
    return {"prompt": [{"role": "user", "content": text}], "images": list(pictures)}
