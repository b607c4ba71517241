import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from qlightning.errors import ConfigError
from recipes.data import Cifar10, Digits, FashionMnist, ImageNet, Images, Npz
from recipes.data.arrays import _Collate


def write_npz(path, size=28, channels=(3,), **changes):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 40), ("val", 8), ("test", 12)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, size, size, *channels), dtype=np.uint8)
        arrays[f"{split}_labels"] = np.arange(count).reshape(-1, 1) % 4
    np.savez(path, **{key: value for key, value in {**arrays, **changes}.items() if value is not None})
    return path


@pytest.fixture
def imagenet_root(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for kind in ("cat", "dog", "emu"):
            folder = tmp_path / split / kind
            folder.mkdir(parents=True)
            for index in range(3):
                Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(folder / f"{index}.jpg")
    return tmp_path


@pytest.fixture(params=["digits", "npz", "imagenet"])
def data(request, tmp_path):
    if request.param == "digits":
        module = Digits(batch_size=16)
    elif request.param == "npz":
        module = Npz(write_npz(tmp_path / "set.npz"), batch_size=16)
    else:
        module = ImageNet(request.getfixturevalue("imagenet_root"), batch_size=4, resize=32, crop=24, num_workers=0)
    module.setup()
    return module


def batches(loader):
    return [(images.clone(), labels) for images, labels in loader]


def same(first, second):
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, second, strict=True))


def test_every_loader_gives_normalized_float_images_and_class_numbers(data):
    for loader in (data.train_dataloader, data.val_dataloader, data.test_dataloader, data.calibration_dataloader):
        images, labels = next(iter(loader()))
        assert images.dtype == torch.float32
        assert images.shape[1] == 3
        assert labels.dtype == torch.int64
        assert labels.shape == images.shape[:1]
        assert int(labels.min()) >= 0
        assert int(labels.max()) < data.num_classes


def test_training_batches_follow_the_seed_and_nothing_else_does(data):
    pl.seed_everything(1)
    first = batches(data.train_dataloader())
    calibration, test = batches(data.calibration_dataloader()), batches(data.test_dataloader())
    pl.seed_everything(1)
    assert same(first, batches(data.train_dataloader()))
    pl.seed_everything(2)
    assert not same(first, batches(data.train_dataloader()))
    assert same(calibration, batches(data.calibration_dataloader()))
    assert same(test, batches(data.test_dataloader()))


def test_calibration_sees_training_images_in_random_order_as_the_test_would(tmp_path):
    data = Npz(write_npz(tmp_path / "set.npz"), batch_size=40)
    data.setup()
    images, labels = next(iter(data.calibration_dataloader()))
    train = data._splits[0]
    plain, _ = _Collate(data.mean, data.std)(train)
    order = [int((plain == image).flatten(1).all(1).nonzero()) for image in images]
    assert sorted(order) == list(range(40))
    assert order != list(range(40))
    assert torch.equal(labels, train.labels[order])


def test_the_calibration_seed_decides_which_images_come_first(tmp_path):
    path = write_npz(tmp_path / "set.npz")
    firsts = [batches(Npz(path, batch_size=8, calibration_seed=seed).calibration_dataloader())[0] for seed in (0, 1)]
    assert not torch.equal(firsts[0][0], firsts[1][0])
    assert same(batches(Npz(path).calibration_dataloader()), batches(Npz(path).calibration_dataloader()))


def test_normalization_takes_the_mean_off_and_divides_by_the_deviation():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 2, 2, 3)
    images, _ = _Collate((0.5, 0.5, 0.5), (0.25, 0.5, 1.0))(Images(pixels, torch.zeros(1)))
    torch.testing.assert_close(images[0, :, 0, 0], torch.tensor([-2.0, -0.6, 0.5]))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_augmentation_is_a_window_of_the_padded_image_mirrored_or_not():
    torch.manual_seed(0)
    pixels = torch.randint(1, 256, (64, 6, 6, 3), dtype=torch.uint8)
    augmented = _Collate((0, 0, 0), (1, 1, 1), crop_padding=2, flip=True)._augment(pixels)
    padded = torch.nn.functional.pad(pixels, (0, 0, 2, 2, 2, 2))
    seen = set()
    for index, image in enumerate(augmented):
        windows = {
            (y, x, flip): window.flip(1) if flip else window
            for y in range(5)
            for x in range(5)
            for flip in (False, True)
            for window in [padded[index, y : y + 6, x : x + 6]]
        }
        seen |= {place for place, window in windows.items() if torch.equal(window, image)}
    assert len(seen) > 30  # of 50 places


def test_digits_are_split_the_same_way_every_time_with_all_classes_everywhere():
    first, second = Digits(), Digits(size=8, augment=False)
    first.setup()
    second.setup()
    assert [len(images) for images in first._splits] == [1200, 197, 400]
    for a, b in zip(first._splits, second._splits, strict=True):
        assert torch.equal(a.labels, b.labels)
        assert len(a.labels.unique()) == 10
    assert first.num_classes == 10
    pixels = torch.cat([images.pixels for images in first._splits]).float() / 255
    assert pixels.mean().item() == pytest.approx(first.mean[0], abs=0.005)
    assert pixels.std().item() == pytest.approx(first.std[0], abs=0.005)


@pytest.mark.parametrize("channels", [(), (1,), (3,)], ids=["gray", "one channel", "RGB"])
def test_npz_takes_gray_and_rgb_images(tmp_path, channels):
    data = Npz(write_npz(tmp_path / "set.npz", channels=channels))
    data.setup()
    assert next(iter(data.test_dataloader()))[0].shape == (12, 3, 28, 28)
    assert data.num_classes == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_images": None, "val_labels": None}, "lacks val_images, val_labels"),
        ({"test_labels": np.zeros(3, dtype=np.int64)}, "12 images with 3 labels"),
        ({"train_images": np.zeros((40, 8, 8, 3))}, "float64"),
        ({"train_images": np.zeros((40, 8, 8, 2), dtype=np.uint8)}, r"\(40, 8, 8, 2\)"),
    ],
)
def test_an_npz_file_of_another_form_is_an_error(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        Npz(write_npz(tmp_path / "set.npz", **changes)).setup()


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_a_file_that_is_no_npz_is_an_error(tmp_path, suffix):
    path = tmp_path / f"set.{suffix}"
    path.write_bytes(b"text")
    with pytest.raises(ConfigError, match="cannot be read"):
        Npz(path).setup()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda path: Npz(None), r"data\.path=FILE\.npz"),
        (lambda path: Npz(path / "none.npz"), r"No file at data\.path=.*none\.npz.*MedMNIST"),
        (lambda path: Cifar10(path), r"data\.download=true"),
        (lambda path: FashionMnist(path), r"data\.download=true"),
        (lambda path: ImageNet(None), r"data\.path=ROOT"),
        (lambda path: ImageNet(path), r"No folder .*train.*image-net\.org"),
    ],
)
def test_a_missing_set_says_how_to_get_it(tmp_path, build, message):
    with pytest.raises(ConfigError, match=message):
        build(tmp_path).setup()


def test_cifar10_and_fashion_mnist_read_what_torchvision_keeps(tmp_path, monkeypatch):
    class Kept:
        def __init__(self, path, train, download=False):
            self.data = np.full((6 if train else 2, *self.shape), 7, dtype=np.uint8)
            self.targets = list(range(len(self.data)))

    for module, shape in ((Cifar10, (32, 32, 3)), (FashionMnist, (28, 28))):
        monkeypatch.setattr(module, "dataset", type("Kept", (Kept,), {"shape": shape}))
        data = module(tmp_path, val_size=2)
        data.setup()
        assert [images.labels.tolist() for images in data._splits] == [[0, 1, 2, 3], [4, 5], [0, 1]]
        assert next(iter(data.test_dataloader()))[0].shape == (2, 3, 32, 32)


def test_the_shared_cifar10_file_reads_as_described(shared_data):
    data = Npz(shared_data / "cifar10.npz")
    data.setup()
    assert [len(images) for images in data._splits] == [28000, 2000, 10000]
    assert data.num_classes == 10
