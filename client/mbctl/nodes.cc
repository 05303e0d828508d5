// node ls|drain|undrain.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "client/lib/exit_code.h"
#include "client/mbctl/commands.h"
#include "client/mbctl/output.h"
#include "client/mbctl/session.h"
#include "recipes/config/text_form.h"

namespace mbridge::mbctl {
namespace {

std::string NodeTable(const std::vector<v1::Node>& nodes) {
  Table table({"NODE", "STATE", "CPU SLOTS", "GPUS", "MEMORY", "ISA", "JOBS", "LAST REPORT", "NOTE"});
  for (const v1::Node& node : nodes) {
    const v1::NodeInventory& inventory = node.inventory();
    table.Add({node.node_id(), StripPrefix(v1::NodeState_Name(node.state()), "NODE_STATE_"),
               fmt::format("{}/{}", node.cpu_slots_used(), inventory.cpu_cores()),
               fmt::format("{}/{}", node.gpu_uuids_used_size(), inventory.gpus_size()),
               recipes::FormatBytes(inventory.memory_bytes()), inventory.cpu_isa(), fmt::format("{}", node.job_ids_size()),
               FormatAge(node.last_report_time()) + " ago", node.drain_reason()});
  }
  return table.Text();
}

}  // namespace

void AddNodes(CLI::App* app, Session* session) {
  auto* group = app->add_subcommand("node", "Machines that train: ls, drain, undrain");
  group->require_subcommand(1);
  auto* list = group->add_subcommand("ls", "List nodes");
  list->callback([=] {
    session->action = [=]() -> int {
      MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
      MBCTL_ASSIGN_OR_FAIL(const auto nodes, *session, client->ListNodes());
      v1::ListNodesResponse all;
      std::string names;
      for (const v1::Node& node : nodes) {
        *all.add_nodes() = node;
        names += (names.empty() ? "" : "\n") + node.node_id();
      }
      if (nodes.empty()) session->Say("no node has connected yet");
      return session->Print(all, names, [&] { return NodeTable(nodes); });
    };
  });
  for (const bool drain : {true, false}) {
    auto node_id = std::make_shared<std::string>();
    auto reason = std::make_shared<std::string>();
    auto* command = group->add_subcommand(drain ? "drain" : "undrain",
                                          drain ? "Take no new jobs; running ones go on to their end" : "Take jobs again");
    command->add_option("NODE", *node_id, "Node id")->required();
    if (drain) command->add_option("--reason", *reason, "Shown in node ls");
    command->callback([=] {
      session->action = [=]() -> int {
        MBCTL_ASSIGN_OR_FAIL(client::Client * client, *session, session->Connect());
        MBCTL_ASSIGN_OR_FAIL(const v1::Node node, *session, client->DrainNode(*node_id, drain, *reason));
        return session->Print(node, node.node_id(), [&] { return NodeTable({node}); });
      };
    });
  }
}

}  // namespace mbridge::mbctl
