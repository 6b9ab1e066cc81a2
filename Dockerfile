# The image of deployments/rayservice.yaml: docker build -t REGISTRY/flide-serve:TAG .
# CUDA comes with torch's wheels, the driver from the node. Triton compiles its launchers with gcc, and
# KubeRay's health probes call wget.
FROM python:3.12-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev wget \
  && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ray
WORKDIR /home/ray/flide-serve

COPY pyproject.toml README.md LICENSE ./
COPY flide_engine flide_engine
COPY router router
COPY deployments deployments
COPY loadtest loadtest
COPY tiny_model tiny_model
RUN pip install --no-cache-dir .

USER ray
WORKDIR /home/ray
ENTRYPOINT []
CMD ["bash"]
