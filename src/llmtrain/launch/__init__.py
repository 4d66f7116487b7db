"""From a config to the objects of a run on Kubernetes, and back.

Start with plan_job.py (config -> JobPlan, job.py), then manifests.py (JobPlan -> manifests: ConfigMap, headless
Service, claims, NetworkPolicy) and pod.py (the pod template), kinds/ (what differs between values of launch.kind), and
lifecycle.py (submit, resume, stop, delete). egress.py lists the servers that pods must reach, record.py reads a
launched run back from its ConfigMap. checks.py refuses a config and job_warnings.py warns about one. code_bundle.py and
code_map.py are `launch --with-code`. image.py has the names of images, image_build.py builds one. pod_scripts/ run in
pods without llmtrain, so they import nothing.
"""
