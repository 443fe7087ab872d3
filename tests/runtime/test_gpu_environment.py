"""Environment variables of a rank on a GPU: set where the user has not set them."""

from auto3d.runtime.gpu_environment import set_gpu_environment


def test_what_is_not_set_is_set():
    environment = {"HOME": "/home/me"}
    set_gpu_environment(environment)
    assert environment == {
        "HOME": "/home/me",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_RUNTIME_CONNECT": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_what_the_user_has_set_stays():
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY", "NCCL_RUNTIME_CONNECT": "1"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {**own, name: "max_split_size_mb:128"}
        set_gpu_environment(environment)
        assert environment == {**own, name: "max_split_size_mb:128"}
