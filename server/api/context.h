// What the services of one server share.
#pragma once

#include "server/api/feed.h"
#include "server/api/recipe_source.h"
#include "server/api/submit.h"
#include "server/metrics/service_metrics.h"
#include "server/nodes/controller.h"
#include "server/store/store.h"

namespace mbridge::server {

struct ServiceContext {
  Store* store;
  Controller* controller;
  ServiceMetrics* metrics;
  Submitter* submitter;
  const RecipeSource* recipes;
  Feed* feed;
};

}  // namespace mbridge::server
