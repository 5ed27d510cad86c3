-- Job submit plugin of Slurm: jobs with --comment=optsched get the nodes whose free GPUs are
-- fastest together, or the reason for which they cannot start now. slurm.conf:
--   JobSubmitPlugins=lua
-- The controller is blocked meanwhile, so the answer has one second; without one the job is
-- submitted unchanged. The GPUs are kept for it until the next update of the live cluster.

local url = os.getenv("OPTSCHED_URL") or "http://127.0.0.1:8765/v1/clusters/main/changes"
local header = os.getenv("OPTSCHED_HEADER") -- file with the line "Authorization: Bearer TOKEN"

-- Nothing of a job gets into the body but numbers and types that `request` has checked.
local function ask(body)
  local token = header and (' --header "@' .. header .. '"') or ""
  local pipe = io.popen("curl --silent --max-time 1 --write-out '\\n%{http_code}'" .. token
    .. " --header 'Content-Type: application/json' --data '" .. body .. "' '" .. url .. "'")
  local answer = pipe:read("*a")
  pipe:close()
  return answer:match("^(.*)\n(%d+)$")
end

-- GPUs of "gres/gpu:h100:8", "gres:gpu:8" or "gres/gpu=8", and "h100": the host types of the
-- cluster document need the names of Slurm's GPU types. Jobs with other GPUs are left unchanged.
local function request(tres)
  local gpus, kind = 0, nil
  for part in (tres or ""):gmatch("[^,]+") do
    local rest = part:match("^gpu(.*)$") or part:match("^gres[:/]gpu(.*)$")
    if rest and (rest == "" or rest:match("^[:=]")) then
      local name, number = rest:match("^:?([%w_.%-]*)[:=](%d+)$")
      name, number = name or rest:match("^:?([%w_.%-]*)$"), number or 1
      if not name or gpus > 0 then error("the plugin does not read this request for GPUs", 0) end
      gpus, kind = tonumber(number), name ~= "" and name or nil
    end
  end
  return gpus, kind
end

-- Whether the GPUs that are free now say nothing about the job.
local function elsewhere(job)
  local limits = {"req_nodes", "exc_nodes", "features", "reservation", "dependency", "array_inx"}
  for _, field in ipairs(limits) do
    if (job[field] or "") ~= "" then return true end
  end
  return job.priority == 0 or (job.begin_time or 0) > os.time() -- 0: held
end

-- A number of nodes that the job names, or nil.
local function named(nodes)
  return nodes and nodes > 0 and nodes < slurm.NO_VAL and nodes or nil
end

local function choose(job, uid)
  if job.comment ~= "optsched" or elsewhere(job) then return end
  local each, kind = request(job.tres_per_node)
  local total, other = request(job.tres_per_job)
  if each + total == 0 or (kind and other and kind ~= other) then return end
  local least, most = named(job.min_nodes) or 1, named(job.max_nodes) or math.huge
  local gpus, pod = total, 1
  if each > 0 then
    local nodes = total > 0 and total / each or least
    if nodes % 1 ~= 0 or nodes < least or nodes > most then return end
    gpus, pod, least, most = each * nodes, each, nodes, nodes
  end
  kind = kind or other
  local rules = kind and string.format(', "type": "%s"', kind) or ""
  if job.req_switch == 1 then rules = rules .. ', "level": "leaf"' end
  local name = string.format("submit-%d-%d-%d", uid, os.time(), math.random(1, 10 ^ 9))
  local answer, status = ask(string.format(
    '{"id": "%s", "start": [{"name": "%s", "gpus": %d, "pod": %d%s}]}', name, name, gpus, pod, rules))
  if status == "409" then
    local reason = answer:match('"message":"(.-[^\\])"'):gsub("^start%[0%]: 'submit[%d-]+': ", "")
    slurm.log_user("optsched: %s", reason)
  elseif status ~= "200" then
    slurm.log_info("optsched: status %s: %s", status or "none", answer or "no answer")
  else
    local chosen = {}
    for node in answer:match('"gpus":"([^"]*)"'):gmatch("([^: ]+):") do
      chosen[#chosen + 1] = node
    end
    if #chosen < least or #chosen > most then -- Slurm would add nodes, or refuse these
      ask(string.format('{"id": "%s-back", "give": ["%s"]}', name, name))
    else
      job.req_nodes = table.concat(chosen, ",")
      job.min_nodes, job.max_nodes = #chosen, #chosen
      slurm.log_user("optsched: runs on %s", job.req_nodes)
    end
  end
end

function slurm_job_submit(job, partitions, uid)
  local good, fault = pcall(choose, job, uid)
  if not good then slurm.log_info("optsched: %s", fault) end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

math.randomseed(os.time())
return slurm.SUCCESS
