from ctxlm_ds.apps.init.machine import Machine, describe_gpu, find_machine


def test_a_device_is_the_planners_gpu_of_its_name_or_the_nearest_in_memory():
    assert describe_gpu("NVIDIA H100 80GB HBM3", 79.1, True).name == "H100"
    assert describe_gpu("NVIDIA A100-SXM4-40GB", 39.4, True).name == "A100-40"
    other = describe_gpu("NVIDIA L40S", 44.4, True)
    assert (other.name, other.memory_gib, other.tflops_16bit) == ("NVIDIA L40S", 44.4, 312.0)
    assert Machine(1, describe_gpu("Tesla T4", 14.6, False)).precision == "fp16"


def test_this_machine_has_ranks_and_a_precision():
    machine = find_machine(3)
    assert machine.ranks == 3
    assert machine.gpu is not None or machine.cpu_flops_per_s > 0
    assert machine.precision in ("bf16", "fp16", "fp32")
