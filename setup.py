"""The part of the packaging that metadata cannot say: the C++ and CUDA sources go into the wheel as moe_tk/native/."""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE_FOLDERS = ("tk_kernels", "thunderkittens")
IGNORED = shutil.ignore_patterns("__pycache__", ".*", "*.o", "*.so", "*.pyc")


class build_py_with_native(build_py):
    """An editable install needs no copy: the package then finds the folders of the checkout."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "moe_tk", "native")
        shutil.rmtree(target, ignore_errors=True)  # what an earlier build left could hold deleted files
        for name in NATIVE_FOLDERS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name, ignore=IGNORED)

    def get_outputs(self, include_bytecode=True):
        native = Path(self.build_lib, "moe_tk", "native")
        copied = [os.path.join(parent, name) for parent, _, names in os.walk(native) for name in names]
        return [*super().get_outputs(include_bytecode), *copied]


setup(cmdclass={"build_py": build_py_with_native})
