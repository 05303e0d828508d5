# mb_cudnn: cuDNN and the cudnn-frontend headers, which flash attention needs. Without them the target does not exist, a message
# says why, and the program refuses flash attention.
#   MB_CUDNN_FRONTEND_DIR: folder with cudnn_frontend.h. Else an installed wheel (nvidia-cudnn-frontend) is taken, else the pinned
#   wheel is fetched from PyPI into the build folder.
set(MB_CUDNN_FRONTEND_DIR "" CACHE PATH "Folder with cudnn_frontend.h; found or fetched when empty")
set(MB_CUDNN_FRONTEND_VERSION 1.18.0)
set(MB_CUDNN_FRONTEND_SHA256 382ea063b92cbfd5b442cb75ff8422932d78276aecf139e46713ed1ad3d07af4)

# Sets `result` to the include folder of an installed wheel, or to nothing.
function(mb_installed_cudnn_frontend result)
  set(${result} "" PARENT_SCOPE)
  execute_process(
    COMMAND python3 -c "import importlib.metadata as m; print(m.distribution('nvidia-cudnn-frontend').locate_file('include'))"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed AND EXISTS ${folder}/cudnn_frontend.h)
    set(${result} ${folder} PARENT_SCOPE)
  endif()
endfunction()

# Downloads and unpacks the pinned wheel; sets `result` to its include folder, or `problem` to what went wrong.
function(mb_fetch_cudnn_frontend result problem)
  set(folder ${CMAKE_BINARY_DIR}/cudnn_frontend-${MB_CUDNN_FRONTEND_VERSION})
  set(${result} "" PARENT_SCOPE)
  if(NOT EXISTS ${folder}/include/cudnn_frontend.h)
    file(MAKE_DIRECTORY ${folder})
    message(STATUS "Fetching nvidia-cudnn-frontend ${MB_CUDNN_FRONTEND_VERSION} from PyPI")
    # One fixed file, whichever Python is here: its headers are wanted only.
    execute_process(
      COMMAND python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 311
        --implementation cp --abi cp311 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
        --dest ${folder} nvidia-cudnn-frontend==${MB_CUDNN_FRONTEND_VERSION}
      ERROR_VARIABLE error OUTPUT_QUIET RESULT_VARIABLE failed TIMEOUT 120)
    file(GLOB wheel ${folder}/*.whl)
    if(failed OR NOT wheel)
      set(${problem} "pip could not download it: ${error}" PARENT_SCOPE)
      return()
    endif()
    file(SHA256 ${wheel} digest)
    if(NOT digest STREQUAL MB_CUDNN_FRONTEND_SHA256)
      file(REMOVE ${wheel})
      set(${problem} "the downloaded wheel has SHA-256 ${digest}, not ${MB_CUDNN_FRONTEND_SHA256}" PARENT_SCOPE)
      return()
    endif()
    execute_process(COMMAND ${CMAKE_COMMAND} -E tar xf ${wheel} WORKING_DIRECTORY ${folder} RESULT_VARIABLE failed)
    file(REMOVE ${wheel})
    if(failed)
      set(${problem} "the wheel could not be unpacked" PARENT_SCOPE)
      return()
    endif()
  endif()
  set(${result} ${folder}/include PARENT_SCOPE)
endfunction()

if(MB_HAVE_CUDA)
  find_path(MB_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(MB_CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR})
  set(frontend ${MB_CUDNN_FRONTEND_DIR})
  if(NOT MB_CUDNN_INCLUDE OR NOT MB_CUDNN_LIBRARY)
    set(problem "cuDNN (cudnn.h, libcudnn.so) is not installed")
  elseif(frontend AND NOT EXISTS ${frontend}/cudnn_frontend.h)
    message(FATAL_ERROR "MB_CUDNN_FRONTEND_DIR=${frontend} has no cudnn_frontend.h")
  elseif(NOT frontend)
    mb_installed_cudnn_frontend(frontend)
    if(NOT frontend)
      mb_fetch_cudnn_frontend(frontend problem)
    endif()
  endif()
  if(frontend AND MB_CUDNN_INCLUDE AND MB_CUDNN_LIBRARY)
    add_library(mb_cudnn INTERFACE)
    target_include_directories(mb_cudnn SYSTEM INTERFACE ${frontend} ${MB_CUDNN_INCLUDE})
    target_link_libraries(mb_cudnn INTERFACE ${MB_CUDNN_LIBRARY})
    target_compile_definitions(mb_cudnn INTERFACE MB_CUDNN_FRONTEND)
    message(STATUS "Flash attention: cudnn-frontend in ${frontend}")
  else()
    message(WARNING "Flash attention is off: ${problem}. Install cuDNN 9 and `pip install nvidia-cudnn-frontend`, or set "
      "MB_CUDNN_FRONTEND_DIR to a folder with cudnn_frontend.h.")
  endif()
endif()
