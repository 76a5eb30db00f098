"""Terms of the cost model that no data sheet gives and no kernel count shows: fitted to published runs.

    GEMMs, attention, other kernels, bytes on links   x factor
    host time of a layer                              a floor under its kernels
    collective                                        + time of a call, + time of each step of a ring between nodes
    step                                              x (1 + jitter log2(data-parallel ranks))
    memory of activations, of gathered inputs         x factor, + bytes of the logits of a whole microbatch

Neutral values leave a prediction as it is without them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Factor = Annotated[float, Field(ge=0.2, le=20)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
# An allocator never holds less than the tensors.
AtLeast1 = Annotated[float, Field(ge=1, le=20)]


class FittedTerms(BaseModel):
    """Fitted terms of one practice.

    Attributes:
        products: time of GEMMs that compute, relative to the accelerator's `matmul_fraction`.
        attention: time of fused attention, relative to the accelerator's `attention_fractions`.
        memory: time of memory-bound kernels, relative to counted accesses at the accelerator's bandwidth.
        hidden_tax: slowdown of computation per second of communication that overlaps with it, on top of the
            multiprocessors that a collective takes.
        host_layer_us: time that the host needs to launch forward and backward of a layer for one microbatch.
        host_tensor_us: the same on top for each other tensor-parallel rank, whose hosts wait for one another.
        host_pipeline_us, host_pipeline_tensor_us: the same on top of both where such ranks are in a pipeline, whose
            hosts wait for messages and cannot launch ahead.
        host_nodes: exponent with which all of these grow with the nodes of a tensor-parallel group.
        call_us: time of a collective on top of the cluster's.
        hop_us: time of each step of a ring between nodes on top of the cluster's.
        inner, outer: time of a collective's bytes inside a node and between nodes, relative to the cluster's links.
        fall: exponent with which `outer` grows with the nodes of a group.
        jitter: part of a step that is lost for each doubling of data-parallel ranks.
        activation_memory: bytes reserved for activations and transient tensors, relative to those tensors.
        logit_memory: bytes reserved for each logit of a whole microbatch, where the loss takes no chunks.
        gathered_memory: bytes reserved for gathered inputs of linears that a host launches ahead of its accelerator,
            relative to those tensors (`reserved.py`).
        spread: 10th and 90th percentile of measured over predicted step times in the held-out folds.
        memory_spread: the same of reserved over predicted bytes of memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    products: Factor = 1.0
    attention: Factor = 1.0
    memory: Factor = 1.0
    hidden_tax: AtLeast0 = 0.0
    host_layer_us: AtLeast0 = 0.0
    host_tensor_us: AtLeast0 = 0.0
    host_pipeline_us: AtLeast0 = 0.0
    host_pipeline_tensor_us: AtLeast0 = 0.0
    host_nodes: Annotated[float, Field(ge=0, le=3)] = 0.0
    call_us: AtLeast0 = 0.0
    hop_us: AtLeast0 = 0.0
    inner: Factor = 1.0
    outer: Factor = 1.0
    fall: Annotated[float, Field(ge=0, le=3)] = 0.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    activation_memory: AtLeast1 = 1.0
    logit_memory: AtLeast0 = 0.0
    gathered_memory: AtLeast0 = 0.0
    spread: tuple[Factor, Factor] = (0.8, 1.25)
    memory_spread: tuple[Factor, Factor] = (0.8, 1.25)


NEUTRAL = FittedTerms()
