# syntax=docker/dockerfile:1
# llmtrain with the tested versions of its requirements (constraints.txt), for CPUs or for NVIDIA GPUs:
#     docker build --target cpu -t llmtrain:cpu .
#     docker build --target cuda -t llmtrain:cuda .
#     mkdir -p runs data
#     docker run --rm --init --stop-timeout 600 -v "$PWD/runs:/llmtrain/runs" llmtrain:cpu launch quickstart
#     docker run --rm --init --stop-timeout 600 --gpus all --ipc host -v "$PWD/runs:/llmtrain/runs" llmtrain:cuda launch edit_350m
# --stop-timeout is longer than a checkpoint takes; by itself `docker stop` kills after 10 s. Without --init, Python is PID 1, for
# which the kernel drops signals until Python handles them: a stop in the first seconds would be lost.
# torch from PyPI is built for CUDA on Linux, and trains on CPUs too. A smaller image for CPUs, or one for an older driver,
# takes torch from the index that pytorch.org names for it: --build-arg TORCH_INDEX=...
# Mounted folders must be writable for user 1000; otherwise add --user "$(id -u):$(id -g)".
# launch/README.md says what of this file has been tested.

FROM python:3.11-slim-bookworm AS base
# USER is for torch, which asks for a name that a --user without an account does not have.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    USER=llmtrain \
    HF_HOME=/llmtrain/data/huggingface \
    MPLCONFIGDIR=/tmp/matplotlib
RUN useradd --create-home --uid 1000 llmtrain \
    && mkdir --parents /llmtrain/runs /llmtrain/data \
    && chmod 1777 /llmtrain/runs /llmtrain/data
WORKDIR /llmtrain

# The requirements are a layer of their own, which a change of the package leaves as it is.
FROM base AS requirements
ARG TORCH_INDEX=""
COPY requirements.txt constraints.txt ./
RUN python -m venv /opt/venv \
    && PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir torch --constraint constraints.txt \
    && pip install --no-cache-dir --requirement requirements.txt --constraint constraints.txt

FROM base AS cpu
COPY --from=requirements /opt/venv /opt/venv
COPY . .
RUN pip install --no-cache-dir --no-deps --editable .
USER 1000
ENTRYPOINT ["llmtrain"]
CMD ["launch", "quickstart"]

FROM cpu AS cuda
# torch.compile builds kernels with a C compiler. CUDA itself comes with torch, and the driver from the host.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 1000
