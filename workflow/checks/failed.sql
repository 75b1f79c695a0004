-- title: Prompts that failed
-- unit: share
-- limit: 0.02
-- advice: See the reasons: select reason, count(*) from completions group by reason. `shardmill retry REASON` sets those rows to
--   be done again.
SELECT avg((status = 'failed')::INTEGER) FROM completions;

-- examples:
SELECT prompt_id, reason || ' after ' || attempts || ' attempts at ' || coalesce(server, 'no server')
FROM completions WHERE status = 'failed' ORDER BY conversation_id, turn LIMIT 3;
