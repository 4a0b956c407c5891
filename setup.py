"""Put ds_configs/ and slurm/ of the top level into the package when a wheel is built; the rest is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFolders(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("ds_configs", "slurm"):
                self.copy_tree(name, str(Path(self.build_lib, "ctxlm_ds", name)))


setup(cmdclass={"build_py": BuildWithShippedFolders})
