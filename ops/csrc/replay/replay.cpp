// SPDX-License-Identifier: Apache-2.0
// Repeats a recorded sequence of kernel launches and torch ops on other tensors (ops/triton_kernels/recording.py).
//
// A program is a list of steps over numbered slots, each of which holds one tensor. The first slots are the inputs.
//   allocate   a new tensor of a known size
//   launch     a compiled kernel; its arguments are known bytes, addresses in a slot's tensor, or TMA descriptors
//   op         a torch op, called through the dispatcher without Python
//   free       drops the tensor of a slot
// Nothing here knows what a kernel computes.

#include <ATen/ops/empty_strided.h>
#include <cuda.h>
#include <dlfcn.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace py = pybind11;

namespace {

// The functions of the CUDA driver that a program calls. Tests put their own in place of the first two.
struct Driver {
  decltype(&cuLaunchKernelEx) launch = nullptr;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  decltype(&cuCtxGetCurrent) context = nullptr;
  decltype(&cuCtxSetCurrent) set_context = nullptr;
  decltype(&cuDeviceGet) device = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain_context = nullptr;
};

Driver& driver() {
  static Driver functions = [] {
    Driver found;
    if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
      found.launch = reinterpret_cast<decltype(found.launch)>(dlsym(library, "cuLaunchKernelEx"));
      found.encode = reinterpret_cast<decltype(found.encode)>(dlsym(library, "cuTensorMapEncodeTiled"));
      found.context = reinterpret_cast<decltype(found.context)>(dlsym(library, "cuCtxGetCurrent"));
      found.set_context = reinterpret_cast<decltype(found.set_context)>(dlsym(library, "cuCtxSetCurrent"));
      found.device = reinterpret_cast<decltype(found.device)>(dlsym(library, "cuDeviceGet"));
      found.retain_context =
          reinterpret_cast<decltype(found.retain_context)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
    }
    return found;
  }();
  return functions;
}

void check(CUresult result, const char* what, const std::string& kernel = "") {
  TORCH_CHECK(result == CUDA_SUCCESS, what, kernel, " failed with CUDA driver error ", int(result));
}

// A thread in which the CUDA runtime has not worked yet (autograd starts such threads) has no context. The driver's
// functions need one, and do not take the device's own by themselves.
void bind_context(const at::Device& device) {
  CUcontext context = nullptr;
  if (!device.is_cuda() || !driver().context || (driver().context(&context) == CUDA_SUCCESS && context)) return;
  CUdevice gpu;
  check(driver().device(&gpu, device.index()), "finding the GPU");
  check(driver().retain_context(&context, gpu), "making a CUDA context current");
  check(driver().set_context(context), "making a CUDA context current");
}

using Slots = std::vector<at::Tensor>;

struct Address {
  int64_t slot;
  int64_t offset;  // bytes from the tensor's first element

  uint64_t of(const Slots& slots) const { return reinterpret_cast<uint64_t>(slots[slot].data_ptr()) + offset; }
};

// What cuTensorMapEncodeTiled takes beside an address, innermost dimension first.
struct Map {
  Address address;
  int swizzle, dtype;
  cuuint32_t rank;
  std::array<cuuint64_t, 5> shape, strides;
  std::array<cuuint32_t, 5> box;
};

struct Allocate {
  int64_t slot;
  std::vector<int64_t> shape, strides;
  at::TensorOptions options;

  void run(Slots& slots, CUstream) const { slots[slot] = at::empty_strided(shape, strides, options); }
};

struct Free {
  std::vector<int64_t> freed;

  void run(Slots& slots, CUstream) const {
    for (auto slot : freed) slots[slot].reset();
  }
};

struct Launch {
  std::string name;
  CUfunction function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared_bytes;
  std::vector<std::variant<uint64_t, Address, Map>> arguments;

  void run(Slots& slots, CUstream stream) const {
    if (!grid[0] || !grid[1] || !grid[2]) return;
    TORCH_CHECK(driver().launch && driver().encode, "libcuda.so.1 lacks cuLaunchKernelEx or cuTensorMapEncodeTiled");
    const size_t count = arguments.size();
    // A vector of descriptors would have to be aligned by hand: a kernel has ten at most.
    alignas(64) CUtensorMap maps[MOST_MAPS];
    std::vector<uint64_t> values(count + 2);  // then two scratch addresses, which are null
    std::vector<void*> parameters(count + 2);
    int next_map = 0;
    for (size_t i = 0; i < count + 2; ++i) {
      parameters[i] = &values[i];
      if (i >= count) continue;
      if (auto* value = std::get_if<uint64_t>(&arguments[i])) {
        values[i] = *value;
      } else if (auto* address = std::get_if<Address>(&arguments[i])) {
        values[i] = address->of(slots);
      } else {
        parameters[i] = encode(std::get<Map>(arguments[i]), slots, &maps[next_map++]);
      }
    }
    CUlaunchConfig config{};
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
    config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
    config.hStream = stream;
    check(driver().launch(&config, function, parameters.data(), nullptr), "the launch of kernel ", name);
  }

  static constexpr int MOST_MAPS = 10;

 private:
  void* encode(const Map& map, const Slots& slots, CUtensorMap* out) const {
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    check(driver().encode(out, CUtensorMapDataType(map.dtype), map.rank,
                          reinterpret_cast<void*>(map.address.of(slots)), map.shape.data(), map.strides.data(),
                          map.box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(map.swizzle),
                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
          "a TMA descriptor of kernel ", name);
    return out;
  }
};

struct Op {
  // An argument that is a tensor or a list of tensors, by its place among the op's arguments.
  struct Given {
    size_t place;
    bool list;
    std::vector<int64_t> slots;
  };

  c10::OperatorHandle op;
  torch::jit::Stack constants;  // every argument; None where a tensor belongs
  std::vector<Given> given;
  std::vector<int64_t> made;  // slots of the results. Empty: the op only changes its arguments

  void run(Slots& slots, CUstream) const {
    torch::jit::Stack stack = constants;
    for (const auto& argument : given) {
      if (!argument.list) {
        stack[argument.place] = slots[argument.slots[0]];
        continue;
      }
      c10::List<at::Tensor> list;
      for (auto slot : argument.slots) list.push_back(slots[slot]);
      stack[argument.place] = std::move(list);
    }
    op.callBoxed(stack);
    if (made.empty()) return;
    if (stack.size() == 1 && stack[0].isTensorList()) {
      auto list = stack[0].toTensorVector();
      for (size_t i = 0; i < made.size(); ++i) slots[made[i]] = std::move(list[i]);
    } else {
      for (size_t i = 0; i < made.size(); ++i) slots[made[i]] = std::move(stack[i]).toTensor();
    }
  }
};

class Program {
 public:
  explicit Program(int64_t inputs) : inputs_(inputs), slots_(inputs) {}

  // Returns the slot of the new tensor.
  int64_t allocate(std::vector<int64_t> shape, std::vector<int64_t> strides, at::ScalarType dtype, at::Device device) {
    steps_.emplace_back(Allocate{slots_, std::move(shape), std::move(strides), at::dtype(dtype).device(device)});
    return slots_++;
  }

  void free(std::vector<int64_t> slots) { steps_.emplace_back(Free{std::move(slots)}); }

  void launch(std::string name, uint64_t function, std::array<unsigned, 3> grid, unsigned threads,
              unsigned shared_bytes, const py::list& arguments) {
    Launch step{std::move(name), reinterpret_cast<CUfunction>(function), grid, threads, shared_bytes, {}};
    int maps = 0;
    for (const auto& argument : arguments) {
      if (py::isinstance<py::int_>(argument)) {
        // Two's complement, of which a narrower parameter reads the low bytes.
        auto value = py::reinterpret_borrow<py::int_>(argument);
        step.arguments.emplace_back(uint64_t(PyLong_AsUnsignedLongLongMask(value.ptr())));
      } else if (py::isinstance<Address>(argument)) {
        step.arguments.emplace_back(argument.cast<Address>());
      } else {
        step.arguments.emplace_back(argument.cast<Map>());
        ++maps;
      }
    }
    TORCH_CHECK(maps <= Launch::MOST_MAPS, "kernel ", step.name, " takes ", maps, " TMA descriptors; at most ",
                Launch::MOST_MAPS, " are supported");
    steps_.emplace_back(std::move(step));
  }

  // `arguments`: in the schema's order; an int slot is wrapped in a Slot. Returns the slots of `results` tensors.
  std::vector<int64_t> op(const std::string& name, const std::string& overload, const py::list& arguments,
                          int64_t results) {
    Op step{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}, {}, {}};
    const auto& schema = step.op.schema().arguments();
    torch::jit::ToIValueAllowNumbersAsTensors numbers(true);  // as in x + 1
    TORCH_CHECK(schema.size() == arguments.size(), name, ": expected ", schema.size(), " arguments, got ",
                arguments.size());
    for (size_t i = 0; i < schema.size(); ++i) {
      py::object argument = arguments[i];
      std::vector<int64_t> slots;
      bool list = false;
      if (py::isinstance<Slot>(argument)) {
        slots.push_back(argument.cast<Slot>().index);
      } else if (py::isinstance<py::list>(argument)) {
        auto items = py::reinterpret_borrow<py::list>(argument);
        list = items.size() && py::isinstance<Slot>(items[0]);
        if (list) {
          for (const auto& one : items) slots.push_back(one.cast<Slot>().index);
        }
      }
      if (slots.empty()) {
        step.constants.push_back(torch::jit::toIValue(argument, schema[i].type()));
      } else {
        step.constants.emplace_back();
        step.given.push_back({i, list, std::move(slots)});
      }
    }
    for (int64_t i = 0; i < results; ++i) step.made.push_back(slots_++);
    auto made = step.made;
    steps_.emplace_back(std::move(step));
    return made;
  }

  // `outputs`: a slot for each output; -1 stands for None.
  void set_outputs(std::vector<int64_t> outputs) { outputs_ = std::move(outputs); }

  // Empties the list, so that inputs are freed after their last use.
  std::vector<std::optional<at::Tensor>> run(py::list given, uint64_t stream) const {
    auto inputs = given.cast<std::vector<at::Tensor>>();
    TORCH_CHECK(int64_t(inputs.size()) == inputs_, "a program of ", inputs_, " inputs was called with ",
                inputs.size());
    given.attr("clear")();
    py::gil_scoped_release without_python;
    bind_context(inputs.at(0).device());
    Slots slots = std::move(inputs);
    slots.resize(slots_);
    for (const auto& step : steps_) {
      std::visit([&](const auto& one) { one.run(slots, reinterpret_cast<CUstream>(stream)); }, step);
    }
    std::vector<std::optional<at::Tensor>> out;
    for (auto slot : outputs_) out.push_back(slot < 0 ? std::nullopt : std::optional(slots[slot]));
    return out;
  }

  struct Slot {
    int64_t index;
  };

 private:
  int64_t inputs_, slots_;
  std::vector<std::variant<Allocate, Free, Launch, Op>> steps_;
  std::vector<int64_t> outputs_;
};

// `shape`, `strides` (in elements) and `box` come outermost dimension first, as torch has them.
Map map_of(Address address, int swizzle, uint64_t element_bytes, int dtype, const std::vector<uint32_t>& box,
           const std::vector<uint64_t>& shape, const std::vector<uint64_t>& strides) {
  const size_t rank = box.size();
  TORCH_CHECK(rank >= 1 && rank <= 5 && shape.size() == rank && strides.size() == rank,
              "a TMA descriptor has 1 to 5 dimensions, got ", rank);
  Map map{address, swizzle, dtype, cuuint32_t(rank), {}, {}, {}};
  for (size_t i = 0; i < rank; ++i) {
    map.box[i] = box[rank - 1 - i];
    map.shape[i] = shape[rank - 1 - i];
    if (i + 1 < rank) map.strides[i] = element_bytes * strides[rank - 2 - i];
  }
  return map;
}

py::bytes bytes_of(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

// The properties of each tensor that a program depends on. A missing tensor is one -1.
py::bytes signature(const std::vector<std::optional<at::Tensor>>& tensors) {
  std::vector<int64_t> found;
  for (const auto& x : tensors) {
    if (!x) {
      found.push_back(-1);
      continue;
    }
    found.insert(found.end(), {x->dim(), int64_t(x->scalar_type()), int64_t(x->device().type()), x->device().index(),
                               int64_t(reinterpret_cast<uint64_t>(x->data_ptr()) % 16)});
    found.insert(found.end(), x->sizes().begin(), x->sizes().end());
    found.insert(found.end(), x->strides().begin(), x->strides().end());
  }
  return bytes_of(found);
}

// The distances in memory from the first tensor to each.
py::bytes distances(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> found;
  for (const auto& x : tensors) found.push_back(int64_t(x.data_ptr()) - int64_t(tensors[0].data_ptr()));
  return bytes_of(found);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Address>(m, "Address").def(py::init<int64_t, int64_t>(), py::arg("slot"), py::arg("offset"));
  py::class_<Map>(m, "Map").def(py::init(&map_of), py::arg("address"), py::arg("swizzle"), py::arg("element_bytes"),
                                py::arg("dtype"), py::arg("box"), py::arg("shape"), py::arg("strides"));
  py::class_<Program::Slot>(m, "Slot").def(py::init<int64_t>());
  py::class_<Program>(m, "Program")
      .def(py::init<int64_t>(), py::arg("inputs"))
      .def("allocate", &Program::allocate)
      .def("free", &Program::free)
      .def("launch", &Program::launch)
      .def("op", &Program::op)
      .def("set_outputs", &Program::set_outputs)
      .def("run", &Program::run);
  m.def("signature", &signature);
  m.def("distances", &distances);
  m.def("use_driver", [](uint64_t launch, uint64_t encode) {
    driver().launch = reinterpret_cast<decltype(Driver::launch)>(launch);
    driver().encode = reinterpret_cast<decltype(Driver::encode)>(encode);
  }, "For tests: addresses of functions that stand in for the CUDA driver's.");
}
