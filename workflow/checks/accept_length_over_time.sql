-- title: Accept length of the last quarter of the run, relative to the first
-- unit: ratio
-- limit: 0.85
-- direction: min
-- severity: warning
-- scope: build
-- advice: A fall says that servers wear out: see the report's accept length over time, and restart those that fell.
WITH quarters AS (
    SELECT accept_length, ntile(4) OVER (ORDER BY finished_at) AS quarter
    FROM completions WHERE status = 'ok' AND accept_length IS NOT NULL AND reused_from IS NULL
)
SELECT avg(accept_length) FILTER (quarter = 4) / avg(accept_length) FILTER (quarter = 1) FROM quarters;

-- examples:
SELECT min(prompt_id), server || ': from ' || round(avg(accept_length) FILTER (quarter = 1), 2) || ' to '
    || round(avg(accept_length) FILTER (quarter = 4), 2)
FROM (
    SELECT prompt_id, server, accept_length, ntile(4) OVER (PARTITION BY server ORDER BY finished_at) AS quarter
    FROM completions WHERE status = 'ok' AND accept_length IS NOT NULL AND reused_from IS NULL
)
GROUP BY server ORDER BY avg(accept_length) FILTER (quarter = 4) LIMIT 3;
