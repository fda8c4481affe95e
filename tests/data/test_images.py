"""Images and masked text as training data."""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import ViTConfig, ViTImageProcessor

from linearize.data import batches
from linearize.data.batches import open_processor, source_hash
from linearize.data.documents import end_token
from linearize.data.images import Images, as_picture, find_images
from linearize.data.packing import MaskedBlocks
from linearize.errors import LinearizeError
from linearize.recipe.data import ArraySource, DatasetSource, ImageSource
from linearize.train.losses import cosine_distance

PROCESSOR = ViTImageProcessor(size={"height": 8, "width": 8})
CONFIG = ViTConfig(id2label={0: "ant", 1: "bee"}, label2id={"ant": 0, "bee": 1})


def picture(shade: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    return Image.new("RGB", size, (shade, 0, 255 - shade))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, shade in (("bee/1.png", 20), ("ant/1.png", 90), ("ant/2.jpg", 200)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(shade).save(tmp_path / name)
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_of_classes_gives_what_the_processor_makes_of_each_file(folder: Path) -> None:
    samples = Images(find_images(ImageSource(images=folder.name), folder.parent), PROCESSOR, CONFIG)
    assert [int(samples[i]["labels"]) for i in range(len(samples))] == [0, 0, 1]
    expected = PROCESSOR(Image.open(folder / "bee" / "1.png"), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(samples[2]["pixel_values"], expected)
    assert samples[2]["valid"].tolist() == [True]


def test_classes_follow_the_alphabet_where_the_config_has_no_names_for_them(folder: Path) -> None:
    samples = Images(find_images(ImageSource(images=str(folder)), Path()), PROCESSOR, ViTConfig(num_labels=2))
    assert samples.labels == [0, 0, 1]


def classes(tmp_path: Path, names: list[str]) -> ImageSource:
    """A folder of classes with one picture each."""
    for name in names:
        (tmp_path / "classes" / name).mkdir(parents=True)
        picture(9).save(tmp_path / "classes" / name / "1.png")
    return ImageSource(images=str(tmp_path / "classes"))


def named(names: list[str]) -> ViTConfig:
    """A config that calls its classes so."""
    return ViTConfig(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})


NUMBERS = {str(number): number for number in range(12)}
MANY = {str(number): number for number in range(20)}


@pytest.mark.parametrize(
    ("config", "expected", "note"),
    [
        (ViTConfig(num_labels=12), NUMBERS, "0 is 0, 1 is 1, 2 is 2, .* 10 is 10, 11 is 11$"),
        (ViTConfig(num_labels=20), MANY, r"15 is 15, \.\.\. \(20 in all\)$"),
        (ViTConfig(num_labels=21), {"003": 3, "020": 20}, "003 is 3, 020 is 20$"),
        (named(["ant", "bee"]), {"0": 0, "1": 1}, r"0 is 0 \(ant\), 1 is 1 \(bee\)$"),
        (named(["10", "9"]), {"10": 0, "9": 1}, "10 is 0, 9 is 1$"),  # the model's own names, not numbers
        (named(["bee", "cow", "ant"]), {"ant": 2, "bee": 0}, "bee is 0, ant is 2$"),
        (ViTConfig(num_labels=2), {"b": 1, "a": 0}, "a is 0, b is 1$"),
        (
            named(["tench, Tinca tinca", "goldfish"]),
            {"n01443537": 1, "n01440764": 0},
            r"n01440764 is 0 \(tench, Tinca tinca\), n01443537 is 1 \(goldfish\)$",
        ),
    ],
)
def test_classes_get_the_models_numbers_and_a_line_says_which(
    tmp_path: Path, config: ViTConfig, expected: dict[str, int], note: str
) -> None:
    found = find_images(classes(tmp_path, [*expected]), Path())
    samples = Images(found, PROCESSOR, config)
    assert dict(zip(map(str, found.labels), samples.labels, strict=True)) == expected
    assert re.match(f"classes of {found.where}: .*{note}", samples.note)


@pytest.mark.parametrize(
    ("folders", "config", "message"),
    [
        ([*map(str, range(1, 13))], ViTConfig(num_labels=12), r"has class 12, the model's last is 11"),
        (["1", "01"], ViTConfig(num_labels=2), r"has class 1 under several names, one of them '01'"),
        (["0", "1", "ant"], ViTConfig(num_labels=3), r"has the class '0', the model has 3: LABEL_0"),
        (["0", "1", "2"], named(["1", "2", "3"]), r"has the class '0', the model has 3: 1, 2, 3"),
        (["crane"], named(["crane", "bee", "crane"]), r"'crane', which the model has as 0 and as 2"),
        (
            ["n01440764"],
            named(["tench", "goldfish"]),
            r"'n01440764', the model has 2: goldfish, tench\.+ Of these.* there are 1; set `classes: FILE`",
        ),
    ],
)
def test_classes_that_contradict_the_models_are_refused_or_left_out_where_nothing_learns_them(
    tmp_path: Path, folders: list[str], config: ViTConfig, message: str
) -> None:
    found = find_images(classes(tmp_path, folders), Path())
    with pytest.raises(LinearizeError, match=message):
        Images(found, PROCESSOR, config)
    samples = Images(found, PROCESSOR, config, learns=False)
    assert set(samples.labels) == {-100}
    assert re.search(rf"^note: .*{message}.*runs without, and its predictions are not evaluated", samples.note)


FISH = named(["goldfish", "tench", "shark"])
MAPPING = "n01440764 tench, Tinca tinca\nn01443537 goldfish, Carassius auratus\nn01484850 shark\n"
PAIRS = '{"0": ["n01440764", "tench"], "2": ["n01484850", "shark"]}'


@pytest.mark.parametrize(
    ("file", "folders", "expected"),
    [
        (MAPPING, ["n01484850", "n01440764"], [0, 2]),
        (PAIRS, ["n01484850", "n01440764"], [0, 2]),
        ('{"n01440764": "tench", "n01484850": 2}', ["n01484850", "n01440764"], [1, 2]),
        ("\ufeff" + PAIRS, ["n01484850", "n01440764"], [0, 2]),
        ("\ufeff" + MAPPING, ["n01440764"], [0]),
    ],
    ids=["lines", "pairs", "names", "pairs after a mark", "lines after a mark"],
)
def test_a_file_says_which_classes_folders_are(
    tmp_path: Path, file: str, folders: list[str], expected: list[int]
) -> None:
    (tmp_path / "classes.txt").write_text(file, "utf-8")
    source = ImageSource(images=classes(tmp_path, folders).images, classes="classes.txt")
    first = source_hash(source, tmp_path)
    assert Images(find_images(source, tmp_path), PROCESSOR, FISH).labels == expected
    (tmp_path / "classes.txt").write_text(file + "\n")
    assert source_hash(source, tmp_path) != first


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (MAPPING.replace("n01484850", "n01484851"), r"'n01484850'.*'n01484851'"),
        ('{"n01484850": 3}', r"'n01484850'.*3.*3"),
        ('{"n01484850": "sharks"}', r"3.*'shark'"),
        ('{"n01484850": [2]}', r"'n01484850'.*'\[2\]'.*FOLDER"),
        ("n01484850 a\nn01484850 b\n", "'n01484850'"),
        ('{"1": ["n01484850"], "2": ["n01484850"]}', r"'n01484850'.*1.*2"),
        ("\n", r"each.*folder"),
        ('{"n01484850"', r"cannot.*classes"),
    ],
)
def test_a_file_of_classes_that_does_not_fit_is_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "classes.txt").write_text(file)
    source = ImageSource(images=classes(tmp_path, ["n01484850"]).images, classes="classes.txt")
    with pytest.raises(LinearizeError, match=message):
        Images(find_images(source, tmp_path), PROCESSOR, FISH)


def test_a_datasets_own_order_numbers_its_classes_where_the_config_has_no_names(tmp_path: Path) -> None:
    features = Features({"img": ImageFeature(), "kind": ClassLabel(names=["zebra", "ant"])})
    rows = {"img": [picture(5), picture(6)], "kind": [0, 1]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    found = find_images(DatasetSource(path=str(tmp_path), image_key="img", label_key="kind"), Path())
    assert Images(found, PROCESSOR, ViTConfig(num_labels=2)).labels == [0, 1]


def test_images_without_a_class_are_not_learned(tmp_path: Path) -> None:
    picture(3).save(tmp_path / "a.png")
    assert Images(find_images(ImageSource(images=str(tmp_path)), Path()), PROCESSOR, CONFIG).labels == [-100]


def arrays(path: Path, **values: Any) -> ArraySource:
    np.savez(path / "x.npz", **values)
    return ArraySource(arrays=str(path / "x.npz"))


def test_arrays_are_pictures_or_ready_pixel_values(tmp_path: Path) -> None:
    pictures = np.stack([np.asarray(picture(shade)) for shade in (1, 250)])
    found = find_images(arrays(tmp_path, images=pictures, labels=np.array([1, 0])), Path())
    samples = Images(found, PROCESSOR, CONFIG)
    assert samples.labels == [1, 0]
    assert torch.equal(samples[1]["pixel_values"], PROCESSOR(picture(250), return_tensors="pt")["pixel_values"][0])
    ready = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    samples = Images(find_images(arrays(tmp_path, images=ready), Path()), None, CONFIG)
    assert np.array_equal(samples[1]["pixel_values"], ready[1])


def test_a_grey_array_becomes_rgb(tmp_path: Path) -> None:
    grey = np.full((1, 10, 12, 1), 7, np.uint8)
    pixels = Images(find_images(arrays(tmp_path, images=grey), Path()), PROCESSOR, CONFIG)[0]["pixel_values"]
    assert pixels.shape == (3, 8, 8)
    assert torch.equal(pixels[0], pixels[2])


def test_a_dataset_with_columns_of_images_and_of_classes(tmp_path: Path) -> None:
    features = Features({"img": ImageFeature(), "kind": ClassLabel(names=["bee", "ant"]), "note": Value("string")})
    rows = {"img": [picture(5), picture(6)], "kind": [0, 1], "note": ["", ""]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    source = DatasetSource(path=str(tmp_path), image_key="img", label_key="kind")
    samples = Images(find_images(source, Path()), PROCESSOR, CONFIG)
    assert samples.labels == [1, 0]
    assert torch.equal(samples[0]["pixel_values"], PROCESSOR(picture(5), return_tensors="pt")["pixel_values"][0])
    with pytest.raises(LinearizeError, match="'imgs'"):
        find_images(DatasetSource(path=str(tmp_path), image_key="imgs"), Path())


def test_a_number_below_0_is_no_class(tmp_path: Path) -> None:
    """As datasets have it where classes are kept secret."""
    features = Features({"img": ImageFeature(), "kind": ClassLabel(names=["bee", "ant"])})
    rows = {"img": [picture(5)] * 3, "kind": [-1, None, 0]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    found = find_images(DatasetSource(path=str(tmp_path), image_key="img", label_key="kind"), Path())
    assert Images(found, PROCESSOR, CONFIG).labels == [-100, -100, 1]
    ready = arrays(tmp_path, images=np.zeros((2, 3, 8, 8), np.float32), labels=np.array([-1, 1]))
    assert Images(find_images(ready, Path()), None, CONFIG).labels == [-100, 1]


def test_a_model_without_a_head_has_no_classes_to_fit(folder: Path) -> None:
    found = find_images(ImageSource(images=str(folder)), Path())
    assert Images(found, PROCESSOR, None).labels == [-100] * 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pictures": np.zeros(1)}, "`images`"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.zeros(3)}, "2 images, labels"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.array([0.5, 1])}, "labels are float64"),
        ({"images": np.zeros((2, 4, 4, 3), np.int64)}, "int64"),
        ({"images": np.zeros((1, 4, 4, 3), np.uint8), "labels": np.array([2])}, r"2.*model's.*1"),
        ({"images": np.zeros((0, 4, 4, 3), np.uint8)}, r"train.*on"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(LinearizeError, match=message):
        Images(find_images(arrays(tmp_path, **values), Path()), PROCESSOR, CONFIG)


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(LinearizeError, match=r"folder.*bees"):
        find_images(ImageSource(images="bees"), folder)
    with pytest.raises(LinearizeError, match=r"cannot read .*none\.npz"):
        find_images(ArraySource(arrays="none.npz"), folder)
    (folder / "ant" / "0.png").write_text("no image")
    with pytest.raises(LinearizeError, match=r"0\.png"):
        Images(find_images(ImageSource(images=str(folder)), Path()), PROCESSOR, CONFIG)


def broken(name: str, image: Image.Image, path: Path) -> None:
    """An image that only decoding shows to be none, or whose values PIL would change in silence."""
    if name == "16 bits":
        image = Image.fromarray(np.full((9, 9), 4096, np.uint16))
    image.save(path)
    content = path.read_bytes()
    if name == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif name == "damaged":
        path.write_bytes(content[:60] + b"xxxxxxxx" + content[68:])
    elif name == "huge":
        header = b"IHDR" + struct.pack(">II", 60_000, 60_000) + content[24:29]
        path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    elif name == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize("name", ["cut short", "damaged", "huge", "empty", "16 bits"])
def test_a_broken_image_is_named_when_it_comes(folder: Path, name: str) -> None:
    """Of a folder, and one in memory as datasets give it; the others are read."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    broken(name, noise, folder / "bee" / "2.png")
    samples = Images(find_images(ImageSource(images=str(folder)), Path()), PROCESSOR, CONFIG)
    with pytest.raises(LinearizeError, match=r"bee/2\.png"):
        samples[3]
    assert samples[2]["valid"].all()
    if name in ("cut short", "damaged", "16 bits"):
        with pytest.raises(LinearizeError, match="rows, image 7"):
            as_picture(Image.open(folder / "bee" / "2.png"), "rows, image 7")


def test_a_picture_of_one_pixel_has_its_colour(folder: Path) -> None:
    """Neither its height nor its width is taken for its channels."""
    for size in ((1, 1), (5, 1), (3, 3)):
        picture(20, size).save(folder / "bee" / "1.png")
        samples = Images(find_images(ImageSource(images=str(folder)), Path()), PROCESSOR, CONFIG)
        assert samples[2]["pixel_values"].mean((1, 2)).tolist() == pytest.approx(
            [2 * x / 255 - 1 for x in (20, 0, 235)]
        )


def test_a_class_that_the_model_lacks_is_named(folder: Path) -> None:
    (folder / "bee").rename(folder / "bees")
    with pytest.raises(LinearizeError, match=r"'bees'.*2"):
        Images(find_images(ImageSource(images=str(folder)), Path()), PROCESSOR, CONFIG)


def test_pictures_need_the_checkpoints_processor(folder: Path) -> None:
    with pytest.raises(LinearizeError, match="no image processor"):
        Images(find_images(ImageSource(images=str(folder)), Path()), None, CONFIG)


def test_a_processor_is_found_by_its_name_where_transformers_wants_torchvision_to_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AutoImageProcessor of transformers 5.17 does."""

    def wants(*arguments: Any, **named: Any) -> None:
        raise ImportError("AutoImageProcessor requires the Torchvision library")

    monkeypatch.setattr("linearize.data.batches.AutoImageProcessor", SimpleNamespace(from_pretrained=wants))
    PROCESSOR.save_pretrained(tmp_path)
    assert type(open_processor(tmp_path, "images")) is type(PROCESSOR)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(LinearizeError, match=r"images need: .*Torchvision"):
        open_processor(tmp_path, "images")


class _Blocks:
    """Packed blocks of 400 tokens, the last 50 of them padding; 0 is special, 9 the mask."""

    seq_len = 400

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = 10 + torch.arange(self.seq_len) % 80
        ids[::40] = 0
        return {"input_ids": ids, "valid": torch.arange(self.seq_len) < 350}


def masked(seed: int = 0, mask: int | None = 9) -> MaskedBlocks:
    tokenizer = SimpleNamespace(mask_token_id=mask, vocab_size=90, all_special_ids=[0, 9])
    return MaskedBlocks(_Blocks(), tokenizer, seed)  # type: ignore[arg-type]


def test_masked_text_hides_some_tokens_and_asks_for_them() -> None:
    item, plain = masked()[0], _Blocks()[0]
    asked = item["labels"] != -100
    assert torch.equal(item["labels"][asked], plain["input_ids"][asked])
    assert torch.equal(item["input_ids"][~asked], plain["input_ids"][~asked])
    assert 0.08 < float(asked[:350].float().mean()) < 0.22
    assert not asked[350:].any()
    assert not asked[plain["input_ids"] == 0].any()
    masks = float((item["input_ids"][asked] == 9).float().mean())
    assert 0.6 < masks < 0.95
    assert item["attention_mask"].sum() == 350


def test_masks_are_a_function_of_seed_and_block() -> None:
    assert torch.equal(masked()[1]["input_ids"], masked()[1]["input_ids"])
    assert not torch.equal(masked()[0]["input_ids"], masked()[1]["input_ids"])
    assert not torch.equal(masked()[0]["input_ids"], masked(seed=1)[0]["input_ids"])


def test_a_tokenizer_without_mask_is_refused() -> None:
    with pytest.raises(LinearizeError, match="no mask token"):
        masked(mask=None)


def test_cosine_distance_leaves_padding_out() -> None:
    s, t = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    expected = torch.cat([1 - torch.cosine_similarity(s[0], t[0]), 1 - torch.cosine_similarity(s[1, :2], t[1, :2])])
    t[1, 2:] = torch.nan
    assert torch.allclose(cosine_distance(s, t, real, share=0.5), 0.5 * expected.mean())
    assert torch.allclose(cosine_distance(s[:1], 3 * s[:1], None), torch.zeros(()), atol=1e-6)


def test_text_of_an_encoder_ends_with_its_separator() -> None:
    assert end_token(SimpleNamespace(eos_token_id=None, sep_token_id=4)) == 4  # type: ignore[arg-type]
    with pytest.raises(LinearizeError, match="no eos token"):
        end_token(SimpleNamespace(eos_token_id=None, sep_token_id=None))  # type: ignore[arg-type]


def test_another_picture_of_the_same_size_is_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "0" / "a.bmp"
    file.parent.mkdir()
    found = []
    for most, content, at in (
        (batches.HASHED_IMAGES, b"0", 1),
        (batches.HASHED_IMAGES, b"0", 2),  # copied again
        (batches.HASHED_IMAGES, b"1", 1),
        (99, b"1", 1),  # as in a folder too large to be read
        (99, b"1", 2),
        (99, b"11", 2),
    ):
        monkeypatch.setattr(batches, "HASHED_IMAGES", most)
        file.write_bytes(100 * content)
        os.utime(file, (at, at))
        found.append(source_hash(ImageSource(images=str(tmp_path)), Path()))
    assert found[0] == found[1]
    assert len({*found}) == 5
