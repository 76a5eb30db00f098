# Image with everything that a node needs except the driver: Python, torch with its CUDA libraries, and megatron3d.
#     docker build -t megatron3d .
#     enroot import -o megatron3d.sqsh dockerd://megatron3d          for --container pyxis of tools/make_slurm.py
#     apptainer build megatron3d.sif docker-daemon://megatron3d:latest      for --container apptainer
# Jobs run the checkout that they are submitted from, which is mounted over this copy in the image.
FROM python:3.12-slim
# The compiler is for Triton, which torch.compile uses; the ibverbs and RDMA libraries are for NCCL, which uses TCP without.
RUN apt-get update && apt-get install -y --no-install-recommends \
        git build-essential libibverbs1 ibverbs-providers librdmacm1 rdma-core numactl \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron3d
COPY setup.py README.md ./
COPY megatron3d megatron3d
RUN pip install --no-cache-dir -e ".[data,wandb]"
COPY pretrain_gpt.py ./
COPY configs configs
COPY scripts scripts
COPY tools tools
