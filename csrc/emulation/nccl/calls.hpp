// What every function of the library begins and ends with: handles become communicators,
// misuse that a real NCCL leaves undefined ends the process, failures become results.
#ifndef EMULATION_NCCL_CALLS_HPP
#define EMULATION_NCCL_CALLS_HPP

#include "emulation/nccl/communicator.hpp"

namespace emulation {

ncclComm_t add_handle(const CommunicatorPtr& communicator);
// After this, every use of the handle ends the process.
void end_handle(ncclComm_t handle, const char* function);
// For the few functions that may be called while another thread is inside a call.
CommunicatorPtr find_communicator(ncclComm_t handle, const char* function);

// A communicator for the duration of one call. If a second thread comes in meanwhile, the
// process ends: with a real NCCL it would corrupt the communicator.
class Use {
 public:
  Use(ncclComm_t handle, const char* function) : Use(find_communicator(handle, function), function) {}
  Use(CommunicatorPtr communicator, const char* function);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  Communicator* operator->() const { return communicator_.get(); }
  Communicator& operator*() const { return *communicator_; }
  const CommunicatorPtr& get() const { return communicator_; }

 private:
  CommunicatorPtr communicator_;
  bool is_outermost_ = false;
};

ncclResult_t remember(const Failure& failure);

template <class Body>
ncclResult_t guarded(Body body) noexcept {
  try {
    return body();
  } catch (const Failure& failure) {
    return remember(failure);
  } catch (const Interrupted&) {
    return remember({ncclInternalError, "aborted"});
  } catch (const std::exception& error) {
    return remember({ncclInternalError, error.what()});
  }
}

}  // namespace emulation

#endif  // EMULATION_NCCL_CALLS_HPP
