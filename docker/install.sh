#!/bin/sh
# Makes the file tree that the images hold: PREFIX/bin/coatcheck, all that it needs, and the demo's model.
#
#   sh docker/install.sh [--dependencies | --wheel | --code] PREFIX [SITE_PACKAGES]
#
# It needs no container engine: the Dockerfile runs it, and so may a host without one. An option runs one step of three:
# install what coatcheck needs (this step reads pyproject.toml and constraints.txt alone), build coatcheck's wheel, install
# the wheel. With SITE_PACKAGES, a folder where all dependencies are installed already, they are used from there.
set -eu
case ${1-} in
  --dependencies | --wheel | --code) steps=$1; shift ;;
  *) steps='--dependencies --wheel --code' ;;
esac
prefix=${1:?give the folder to install into, such as /opt/coatcheck}
borrowed=${2-}
cd "$(dirname "$0")/.."
pip="$prefix/bin/python -m pip --disable-pip-version-check --no-cache-dir --quiet"

install_dependencies() {
  "${PYTHON:-python3}" -m venv "$prefix"
  if [ -n "$borrowed" ]; then
    site=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    $pip uninstall --yes setuptools  # what a venv brings may be too old, and would hide the other
    echo "$borrowed" > "$site/borrowed.pth"
    return
  fi
  # torch goes first and alone, so that nothing else's range decides which build of it comes.
  $pip install -c constraints.txt "${TORCH:-torch}"
  list_requirements > "$prefix/requirements.txt"
  $pip install -c constraints.txt -r "$prefix/requirements.txt"
}

list_requirements() {
  "$prefix/bin/python" - <<'END'
import re
import tomllib
from importlib.metadata import packages_distributions

with open("pyproject.toml", "rb") as file:
    written = tomllib.load(file)
project = written["project"]
print(*written["build-system"]["requires"], "wheel", sep="\n")
needed = [*project["dependencies"], *project["optional-dependencies"]["node"]]
# PyTorch for ROCm brings Triton in a package of another name. PyPI's triton would write over its files.
if any(name != "triton" for name in packages_distributions().get("triton", [])):
    needed = [requirement for requirement in needed if re.match(r"[\w-]+", requirement)[0] != "triton"]
print(*needed, sep="\n")
END
}

build_wheel() {
  rm -rf image-wheel
  $pip wheel --no-deps --no-build-isolation --wheel-dir image-wheel .
}

install_code() {
  $pip install --no-deps --no-index --ignore-installed image-wheel/*.whl
  mkdir -p "$prefix/demo"
  cp -r demo/model "$prefix/demo/model"
  # Without its C kernels a CPU would compute several times slower, and nobody would know why.
  "$prefix/bin/python" -c 'from coatcheck.kernels.native import native_status as s; print("kernels:", s()); exit(s() == "torch")'
}

for step in $steps; do
  case $step in
    --dependencies) install_dependencies ;;
    --wheel) build_wheel ;;
    --code) install_code ;;
  esac
done
