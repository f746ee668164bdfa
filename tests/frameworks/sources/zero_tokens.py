"""The same model, all of it used, and the mean over tokens whose labels are not ignored: ranks may have other numbers of them."""

from zero_model import IGNORED, VOCABULARY, Model, loss, optimizer

import trainverify.torch as tvt

__all__ = ["batch", "loss", "model", "optimizer"]
batch = {"ids": tvt.Ids((2, 3), below=VOCABULARY), "labels": tvt.Ids((2, 3), below=VOCABULARY, ignore=IGNORED)}


def model():
    return Model(spare=False)
