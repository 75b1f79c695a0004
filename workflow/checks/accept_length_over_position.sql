-- title: Accept length of the longest quarter of the rows, relative to the shortest
-- unit: ratio
-- limit: 0.60
-- direction: min
-- severity: warning
-- scope: pilot, build
-- advice: Drafts that fail far into the context cost speed, and can be a bug of the server: see the report's accept length by
--   length, and try a newer server version.
WITH quarters AS (
    SELECT accept_length, ntile(4) OVER (ORDER BY prompt_tokens + completion_tokens) AS quarter
    FROM completions WHERE status = 'ok' AND accept_length IS NOT NULL
)
SELECT avg(accept_length) FILTER (quarter = 4) / avg(accept_length) FILTER (quarter = 1) FROM quarters;

-- examples:
SELECT prompt_id, (prompt_tokens + completion_tokens) || ' tokens, accept length ' || round(accept_length, 2)
FROM completions WHERE status = 'ok' AND accept_length IS NOT NULL
ORDER BY prompt_tokens + completion_tokens DESC LIMIT 3;
