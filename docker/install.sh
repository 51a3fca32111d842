#!/bin/sh
# Makes the file tree that the images hold: PREFIX/bin/coatcheck, all that it needs, and the demo's model.
#
#   sh docker/install.sh PREFIX [SITE_PACKAGES]
#
# It needs no container engine: the Dockerfile runs it, and so may a host without one. With SITE_PACKAGES, a folder where
# all dependencies are installed already, they are used from there and only coatcheck itself is built.
set -eu
prefix=${1:?give the folder to install into, such as /opt/coatcheck}
borrowed=${2-}
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" -m venv "$prefix"
pip="$prefix/bin/python -m pip --disable-pip-version-check --no-cache-dir --quiet"
if [ -n "$borrowed" ]; then
  site=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  $pip uninstall --yes setuptools  # what a venv brings may be too old, and would hide the other
  echo "$borrowed" > "$site/borrowed.pth"
  $pip install --no-deps --no-build-isolation --ignore-installed .
else
  # torch goes first and alone, so that nothing else's range decides which build of it comes.
  $pip install -c constraints.txt "${TORCH:-torch}"
  $pip install -c constraints.txt '.[node]'
fi
mkdir -p "$prefix/demo"
cp -r demo/model "$prefix/demo/model"
# Without its C kernels a CPU would compute several times slower, and nobody would know why.
"$prefix/bin/python" -c 'from coatcheck.kernels.native import native_status as s; print("kernels:", s()); exit(s() == "torch")'
