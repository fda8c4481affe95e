"""LoRA on a converted model with Unsloth, on a GPU:

    python examples/unsloth_lora.py runs/llama-gsa/final chats.jsonl

FastModel loads a converted model by its own code, and adds gradient checkpointing and LoRA. FastLanguageModel would put
kernels of its own in the place of a Llama's attention, and the model refuses to run so. docs/works-with.md says what of
this was run.
"""

import sys

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def main(folder: str, data: str) -> None:
    """Train on {"messages": [..]} lines, then save a whole model, which linearize and transformers take."""
    from unsloth import FastModel  # first: it changes transformers and trl as they are imported

    from datasets import load_dataset  # isort: skip
    from trl import SFTConfig, SFTTrainer  # isort: skip

    model, tokenizer = FastModel.from_pretrained(
        folder,
        max_seq_length=4096,
        load_in_4bit=False,
        trust_remote_code=True,  # the folder has code of its own
        attn_implementation="sdpa",  # for the layers that keep softmax
        use_exact_model_name=True,
    )
    model = FastModel.get_peft_model(model, r=16, lora_alpha=32, target_modules=TARGETS)
    rows = load_dataset("json", data_files=data, split="train")
    settings = SFTConfig("unsloth-run", max_length=4096, per_device_train_batch_size=2, gradient_accumulation_steps=8)
    trainer = SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained("unsloth-run/final")
    tokenizer.save_pretrained("unsloth-run/final")


if __name__ == "__main__":
    main(*sys.argv[1:])
