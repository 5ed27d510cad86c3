-- Job submit plugin of Slurm: jobs with --comment=optsched get the nodes whose free GPUs are
-- fastest together, or the reason for which they cannot start now. slurm.conf:
--   JobSubmitPlugins=lua
-- The controller is blocked meanwhile, so the answer has one second; without one the job is
-- submitted unchanged. The GPUs are kept for it until the next update of the live cluster.

local url = os.getenv("OPTSCHED_URL") or "http://127.0.0.1:8765/v1/clusters/main/changes"
local header = os.getenv("OPTSCHED_HEADER") -- file with the line "Authorization: Bearer TOKEN"

local function ask(body)
  local token = header and (' --header "@' .. header .. '"') or ""
  local pipe = io.popen("curl --silent --max-time 1 --write-out '\\n%{http_code}'" .. token
    .. " --header 'Content-Type: application/json' --data '" .. body .. "' " .. url)
  local answer = pipe:read("*a")
  pipe:close()
  return answer:match("^(.*)\n(%d+)$")
end

-- GPUs of "gres/gpu:h100:8", "gres:gpu:8" or "gres/gpu=8".
local function count(tres)
  if not tres or not tres:match("gpu") then return 0 end
  return tonumber(tres:match("gpu[^,]-[:=](%d+)$") or tres:match("gpu[^,]-[:=](%d+),") or 1)
end

-- "h100" of the same: the host types of the cluster document need the names of Slurm's GPU types.
local function product(tres)
  local found = (tres or ""):match("gpu:([^:=,]+)")
  return found and not tonumber(found) and found or nil
end

local function choose(job, uid)
  if job.comment ~= "optsched" or job.req_nodes then return end
  local nodes = (job.min_nodes and job.min_nodes < slurm.NO_VAL) and job.min_nodes or 1
  local each, total = count(job.tres_per_node), count(job.tres_per_job)
  if each + total == 0 then return end
  local gpus, pod = total, 1
  if each > 0 then gpus, pod = each * nodes, each end
  local kind = product(job.tres_per_node) or product(job.tres_per_job)
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
    if each > 0 and #chosen ~= nodes then -- fewer nodes would do, Slurm would add others
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
